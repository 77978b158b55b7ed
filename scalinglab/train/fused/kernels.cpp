// Sublayers of small decoders in float32 on one CPU thread (AVX2 + FMA), with a leading replica axis.
//
// Sizes: K replicas, B sequences, T positions, M = B T tokens, d width, f feed-forward width, V vocabulary,
// H query heads of c channels, of which consecutive groups share one of G key/value heads.
// Activations are contiguous [K, M, ...]. A weight matrix is [out, in] per replica, contiguous inside, with a stride
// between replicas; its gradient is ADDED to and has a stride of its own.
//
// Every product goes through one register tile (12x8, 6x16 or 4x24 outputs). Its right operand is packed into column
// panels padded with zeros to 8 lanes and partial vectors are masked, so no size has to be a multiple of anything.
// Rows are worked off in blocks that stay in the cache. Sums have a fixed order: results repeat to the bit, and no
// replica depends on another. Written for -fno-fast-math: NaN and infinity travel as IEEE says.
//
// This file is the C interface: weights are (pointer, replica stride).

#include "attention.h"
#include "feed_forward.h"
#include "rows.h"
#include "shelf.h"
#include "sinkhorn.h"
#include "streams.h"

extern "C" {

// The shelf is null where there is none; see attention.h.
void scalinglab_attention_forward(Index K, Index B, Index T, Index d, Index H, Index G, Index c, Index capacity,
                                  Index count, Index keeps, float scale, const float* x, const float* query,
                                  Index query_stride, const float* key, Index key_stride, const float* value,
                                  Index value_stride, const float* output, Index output_stride, const float* cosines,
                                  const float* sines, float* shelf, float* y, float* qkv, float* mixed,
                                  float* softmax) {
  const Depth depth{{shelf, token_blocks(T), capacity, 2 * G * c}, nullptr, count, keeps};
  attention_forward(K, B, {T, H, G, c}, d, scale, x,
                    {{query, query_stride}, {key, key_stride}, {value, value_stride}, {output, output_stride}},
                    cosines, sines, depth, y, qkv, mixed, softmax);
}

void scalinglab_attention_backward(Index K, Index B, Index T, Index d, Index H, Index G, Index c, Index capacity,
                                   Index count, Index keeps, float scale, const float* dy, const float* x,
                                   const float* query, Index query_stride, const float* key, Index key_stride,
                                   const float* value, Index value_stride, const float* output, Index output_stride,
                                   const float* cosines, const float* sines, float* shelf, float* grads,
                                   const float* qkv, const float* mixed, const float* softmax, float* dx, float* dquery,
                                   Index dquery_stride, float* dkey, Index dkey_stride, float* dvalue,
                                   Index dvalue_stride, float* doutput, Index doutput_stride) {
  const Depth depth{{shelf, token_blocks(T), capacity, 2 * G * c}, grads, count, keeps};
  attention_backward(K, B, {T, H, G, c}, d, scale, dy, x,
                     {{query, query_stride}, {key, key_stride}, {value, value_stride}, {output, output_stride}},
                     cosines, sines, depth, qkv, mixed, softmax, dx,
                     {{dquery, dquery_stride}, {dkey, dkey_stride}, {dvalue, dvalue_stride},
                      {doutput, doutput_stride}});
}

void scalinglab_put_forward(Index R, Index T, Index w, Index capacity, Index slot, const float* x, float* shelf) {
  put_forward(R, T, w, capacity, slot, x, shelf);
}

void scalinglab_put_backward(Index R, Index T, Index w, Index capacity, Index slot, float* grads, float* dx) {
  put_backward(R, T, w, capacity, slot, grads, dx);
}

void scalinglab_read_forward(Index K, Index B, Index T, Index d, Index capacity, Index n, float eps, const Index* slots,
                             const float* query, float* shelf, float* y, float* kept) {
  read_forward({K, B, T, d, capacity, n, slots, eps}, query, shelf, y, kept);
}

void scalinglab_read_backward(Index K, Index B, Index T, Index d, Index capacity, Index n, float eps,
                              const Index* slots, const float* query, float* shelf, const float* kept, const float* dy,
                              float* grads, float* dquery) {
  read_backward({K, B, T, d, capacity, n, slots, eps}, query, shelf, kept, dy, grads, dquery);
}

void scalinglab_feed_forward_forward(Index K, Index M, Index d, Index f, const float* x, const float* gate,
                                     Index gate_stride, const float* up, Index up_stride, const float* down,
                                     Index down_stride, float* y, float* pre) {
  feed_forward_forward(K, M, d, f, x, {gate, gate_stride}, {up, up_stride}, {down, down_stride}, y, pre);
}

void scalinglab_feed_forward_backward(Index K, Index M, Index d, Index f, const float* dy, const float* x,
                                      const float* pre, const float* gate, Index gate_stride, const float* up,
                                      Index up_stride, const float* down, Index down_stride, float* dx, float* dgate,
                                      Index dgate_stride, float* dup, Index dup_stride, float* ddown,
                                      Index ddown_stride) {
  feed_forward_backward(K, M, d, f, dy, x, pre, {gate, gate_stride}, {up, up_stride}, {down, down_stride}, dx,
                        {dgate, dgate_stride}, {dup, dup_stride}, {ddown, ddown_stride});
}

void scalinglab_norm_forward(Index K, Index M, Index d, float eps, const float* x, const float* gain, Index gain_stride,
                             float* y, float* inverse) {
  norm_forward(K, M, d, eps, x, {gain, gain_stride}, y, inverse);
}

void scalinglab_norm_backward(Index K, Index M, Index d, const float* dy, const float* x, const float* gain,
                              Index gain_stride, const float* inverse, float* dx, float* dgain, Index dgain_stride) {
  norm_backward(K, M, d, dy, x, {gain, gain_stride}, inverse, dx, {dgain, dgain_stride});
}

// Returns the number of targets outside [0, V); nothing is computed unless it is 0.
Index scalinglab_head_forward(Index K, Index M, Index d, Index V, float multiplier, const float* h, const float* w,
                              Index w_stride, const std::int64_t* targets, float* loss, float* weights, float* total) {
  const Index wrong = std::count_if(targets, targets + K * M, [V](std::int64_t t) { return t < 0 || t >= V; });
  if (!wrong) head_forward(K, M, d, V, multiplier, h, {w, w_stride}, targets, loss, weights, total);
  return wrong;
}

void scalinglab_head_backward(Index K, Index M, Index d, Index V, float multiplier, const float* dloss, const float* h,
                              const float* w, Index w_stride, const std::int64_t* targets, const float* weights,
                              const float* total, float* dh, float* dw, Index dw_stride) {
  head_backward(K, M, d, V, multiplier, dloss, h, {w, w_stride}, targets, weights, total, dh, {dw, dw_stride});
}

void scalinglab_mix_forward(Index R, Index share, Index m, Index s, Index d, const float* weights, const float* sources,
                            float* y) {
  mix_forward(R, share, m, s, d, weights, sources, y);
}

void scalinglab_mix_backward(Index R, Index share, Index m, Index s, Index d, const float* dy, const float* weights,
                             const float* sources, float* dweights, float* dsources) {
  mix_backward(R, share, m, s, d, dy, weights, sources, dweights, dsources);
}

void scalinglab_sinkhorn_forward(Index R, Index n, Index iterations, const float* logits, float* y) {
  sinkhorn_forward(R, n, iterations, logits, y);
}

void scalinglab_sinkhorn_backward(Index R, Index n, Index iterations, const float* dy, const float* logits,
                                  float* dlogits) {
  sinkhorn_backward(R, n, iterations, dy, logits, dlogits);
}

void scalinglab_adamw(Index K, Index P, float beta1, float beta2, float correction1, float correction2, float* param,
                      const float* grad, float* mean, float* square, const float* rate_p, const float* decay_p,
                      const float* epsilon_p, const float* rate_k, const float* decay_k, const float* clip_k) {
  adamw(K, P, beta1, beta2, correction1, correction2, param, grad, mean, square, rate_p, decay_p, epsilon_p, rate_k,
        decay_k, clip_k);
}

}  // extern "C"
