"""The trainer: the only folder that imports torch. Import its modules by name; this file stays empty and light."""
