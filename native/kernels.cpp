#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

namespace redraft::ISA {
namespace {

constexpr Index kPositions = kAttentionPositions, kQueries = kAttentionQueries;

// Apply f to sixteen numbers at a time; a rest goes through the same lanes, so that place does not matter.
template <class F>
void map(Index count, float* y, F f) {
  Index i = 0;
  for (; i + 16 <= count; i += 16) store(y + i, f(i, 16));
  if (i == count) return;
  alignas(64) float rest[16];
  store(rest, f(i, count - i));
  std::copy(rest, rest + (count - i), y + i);
}

V16 load_some(const float* p, Index count) {
  if (count == 16) return load(p);
  alignas(64) float lane[16] = {};
  std::copy(p, p + count, lane);
  return load(lane);
}

float sum_of_squares(const float* x, Index dim) {
  V16 acc = zero();
  for (Index i = 0; i < dim; i += 16) {
    const V16 v = load_some(x + i, std::min<Index>(16, dim - i));
    acc = fma(v, v, acc);
  }
  return sum(acc);
}

float dot(const float* a, const float* b, Index dim) {
  V16 acc = zero();
  for (Index i = 0; i < dim; i += 16) {
    const Index n = std::min<Index>(16, dim - i);
    acc = fma(load_some(a + i, n), load_some(b + i, n), acc);
  }
  return sum(acc);
}

void rms_norm(const float* x, const float* weight, float eps, float* y, Index rows, Index dim) {
  for (Index r = 0; r < rows; ++r, x += dim, y += dim) {
    const V16 factor = set1(1.0f / std::sqrt(sum_of_squares(x, dim) / static_cast<float>(dim) + eps));
    map(dim, y, [&](Index i, Index n) { return mul(load_some(weight + i, n), mul(load_some(x + i, n), factor)); });
  }
}

void l2_norm(const float* x, float eps, float scale, float* y, Index rows, Index dim) {
  for (Index r = 0; r < rows; ++r, x += dim, y += dim) {
    const V16 factor = set1(1.0f / std::sqrt(sum_of_squares(x, dim) + eps));
    map(dim, y, [&](Index i, Index n) { return mul(mul(load_some(x + i, n), factor), set1(scale)); });
  }
}

void sigmoid_of(const float* x, float* y, Index count) {
  map(count, y, [&](Index i, Index n) { return sigmoid(load_some(x + i, n)); });
}

void sigmoid_gate(const float* x, const float* gate, float* y, Index count) {
  map(count, y, [&](Index i, Index n) { return mul(load_some(x + i, n), sigmoid(load_some(gate + i, n))); });
}

void swiglu(const float* a, const float* b, float* y, Index count) {
  map(count, y, [&](Index i, Index n) {
    const V16 gate = load_some(a + i, n);
    return mul(mul(gate, sigmoid(gate)), load_some(b + i, n));
  });
}

void situ(const float* a, const float* b, float beta, float linear_beta, float* y, Index count) {
  map(count, y, [&](Index i, Index n) {
    const V16 gate = load_some(a + i, n), capped = mul(set1(beta), tanh(div(gate, set1(beta))));
    V16 up = load_some(b + i, n);
    if (linear_beta > 0) up = mul(set1(linear_beta), tanh(div(up, set1(linear_beta))));
    return mul(mul(capped, sigmoid(gate)), up);
  });
}

void decay(const float* f, const float* neg_exp_a, const float* bound, float* y, Index rows, Index heads, Index dim) {
  for (Index r = 0; r < rows * heads; ++r, f += dim, y += dim) {
    const float a = neg_exp_a[r % heads];
    if (bound != nullptr) {
      map(dim, y, [&](Index i, Index n) {
        return exp(mul(set1(*bound), sigmoid(mul(set1(-a), load_some(f + i, n)))));
      });
      continue;
    }
    alignas(64) float softplus[kMaxKeyDim];
    for (Index i = 0; i < dim; ++i) softplus[i] = std::max(f[i], 0.0f) + std::log1p(std::exp(-std::fabs(f[i])));
    map(dim, y, [&](Index i, Index n) { return exp(mul(set1(a), load_some(softplus + i, n))); });
  }
}

void rope(const float* x, const float* cos, const float* sin, float* y, Index heads, Index dim, Index half) {
  for (Index h = 0; h < heads; ++h, x += dim, y += dim) {
    for (Index i = 0; i < half; ++i) {
      y[i] = x[i] * cos[i] - x[half + i] * sin[i];
      y[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
    }
    std::copy(x + 2 * half, x + dim, y + 2 * half);
  }
}

// Channels [first, end) of one window; taps [W][C].
void short_conv(const float* x, Index step, const float* taps, const float* history, float* y, Index rows, Index channels,
                Index width, Index first, Index end) {
  for (Index t = 0; t < rows; ++t) {
    map(end - first, y + t * channels + first, [&](Index i, Index n) {
      V16 total = zero();
      for (Index tap = 0; tap < width; ++tap) {
        const Index from = t + tap - (width - 1);  // before the window where negative
        const float* input = from < 0 ? history + (from + width - 1) * channels : x + from * step;
        total = fma(load_some(input + first + i, n), load_some(taps + tap * channels + first + i, n), total);
      }
      return mul(total, sigmoid(total));
    });
  }
}

void dot_rows(const float* w, const float* x, float* y, Index rows, Index columns) {
  for (Index r = 0; r < rows; ++r) y[r] = dot(w + r * columns, x, columns);
}

// A block of 16 value columns of one head's state, rows by key: the unit of the scan, small enough for the L1 cache.
struct Block {
  alignas(64) float s[kMaxKeyDim][16];
};

void load_block(Block& block, const float* state, Index keys, Index values, Index column, Index width) {
  for (Index i = 0; i < keys; ++i) store(block.s[i], load_some(state + i * values + column, width));
}

void store_block(const Block& block, float* state, Index keys, Index values, Index column, Index width) {
  for (Index i = 0; i < keys; ++i) std::copy(block.s[i], block.s[i] + width, state + i * values + column);
}

// Rows in four interleaved chains, i mod 4, so that sums do not wait for each other; f(row, chain).
template <class F>
inline void for_keys(Index keys, F f) {
  Index i = 0;
  for (; i + 4 <= keys; i += 4) {
    f(i, 0);
    f(i + 1, 1);
    f(i + 2, 2);
    f(i + 3, 3);
  }
  for (int chain = 0; i < keys; ++i, ++chain) f(i, chain);
}

inline V16 sum_of_chains(const V16* chain) { return add(add(chain[0], chain[1]), add(chain[2], chain[3])); }

// S ← diag(decay) S + k uᵀ. The scan below does exactly these operations, so folding gives the bits of scanning.
void fold(Block& block, const float* decay, Index decay_step, const float* k, V16 u, Index keys) {
  for_keys(keys, [&](Index i, int) {
    const V16 decayed = mul(load(block.s[i]), set1(decay[i * decay_step]));
    store(block.s[i], fma(set1(k[i]), u, decayed));
  });
}

// One token: S ← diag(decay) S; u = β (v − Sᵀk); S ← S + k uᵀ; o = Sᵀq.
V16 step(Block& block, const float* q, const float* k, V16 v, const float* decay, Index decay_step, float beta,
         Index keys, V16& u) {
  V16 read[4] = {zero(), zero(), zero(), zero()};
  for_keys(keys, [&](Index i, int chain) {
    const V16 decayed = mul(load(block.s[i]), set1(decay[i * decay_step]));
    store(block.s[i], decayed);
    read[chain] = fma(set1(k[i]), decayed, read[chain]);
  });
  u = mul(set1(beta), sub(v, sum_of_chains(read)));
  V16 out[4] = {zero(), zero(), zero(), zero()};
  for_keys(keys, [&](Index i, int chain) {
    const V16 updated = fma(set1(k[i]), u, load(block.s[i]));
    store(block.s[i], updated);
    out[chain] = fma(set1(q[i]), updated, out[chain]);
  });
  return sum_of_chains(out);
}

void scan(const Scan& call, const ScanWindow& window, Index head, Index column) {
  const auto& [heads, value_heads, keys, values, decay_dim] = call.shape;
  const Index width = std::min<Index>(16, values - column), decay_step = decay_dim == 1 ? 0 : 1;
  const Index key_head = head * heads / value_heads, size = keys * values, slot_size = value_heads * size;
  const Index planes = std::max<Index>(call.num_planes, 1);
  float* slot = call.state + window.slot * planes * slot_size + head * size;
  float* start = slot + (call.num_planes ? window.plane * slot_size : 0);
  Block block;
  load_block(block, start, keys, values, column, width);
  for (Index r = 0; r < window.num_folded + window.num_replayed; ++r) {
    const Index record = window.slot * call.num_records + r;
    fold(block, call.record_decay + (record * value_heads + head) * decay_dim, decay_step,
         call.record_k + (record * heads + key_head) * keys,
         load_some(call.record_u + (record * value_heads + head) * values + column, width), keys);
  }
  if (window.num_folded) store_block(block, start, keys, values, column, width);
  for (Index row = window.first; row < window.end; ++row) {
    const Index at = row * value_heads + head, token = row - window.first;
    alignas(64) float lanes[16];
    V16 u;
    const V16 o = step(block, call.q + (row * heads + key_head) * keys, call.k + (row * heads + key_head) * keys,
                       load_some(call.v + at * values + column, width), call.decay + at * decay_dim, decay_step,
                       call.beta[at], keys, u);
    store(lanes, o);
    std::copy(lanes, lanes + width, call.out + at * values + column);
    if (window.advance) continue;
    const Index plane = call.num_planes ? (window.plane + 1 + token) % call.num_planes : 0;
    if (call.num_planes && plane != window.last) {
      store_block(block, slot + plane * slot_size, keys, values, column, width);
      continue;
    }
    const Index record = window.slot * call.num_records + (call.num_planes ? 0 : window.num_replayed + token);
    store(lanes, u);
    std::copy(lanes, lanes + width, call.record_u + (record * value_heads + head) * values + column);
  }
  if (window.advance) store_block(block, start, keys, values, column, width);
}

template <class T>
V16 load_kv(const T* p, Index count);

template <>
V16 load_kv(const float* p, Index count) {
  return load_some(p, count);
}

template <>
V16 load_kv(const uint16_t* p, Index count) {
  if (count == 16) return load_bf16(p);
  alignas(64) uint16_t lane[16] = {};
  std::copy(p, p + count, lane);
  return load_bf16(lane);
}

// Keys of up to 64 positions with the positions as lanes: [key_dim][64]. Queries that share them read them from here.
template <class T>
void turn_keys(const AttentionShape& shape, const T* keys, Index count, float* turned) {
  for (Index p = 0; p < count; p += 16) {
    for (Index i = 0; i < shape.key_dim; i += 16) {
      const Index width = std::min<Index>(16, shape.key_dim - i);
      V16 rows[16];
      for (Index r = 0; r < 16; ++r)
        rows[r] = p + r < count ? load_kv(keys + (p + r) * shape.key_step + i, width) : zero();
      transpose(rows);
      for (Index c = 0; c < width; ++c) store(turned + (i + c) * kPositions + p, rows[c]);
    }
  }
}

// What one query has seen so far: its largest score, and sums of weights and of weighted values relative to it.
struct Running {
  float highest, total;
  float* values;  // [value_dim], padded to 16
};

template <class T>
void attend_block(const AttentionShape& shape, const float* q, const float* turned, const T* values, Index count,
                  Running& so_far) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  alignas(64) float scores[kPositions];
  V16 score[4] = {zero(), zero(), zero(), zero()}, block_highest = set1(kNothing);
  for (Index i = 0; i < shape.key_dim; ++i) {
    const V16 number = set1(q[i]);
    for (Index lanes = 0; lanes < 4; ++lanes)  // what lies beyond `count` is not used
      score[lanes] = fma(number, load(turned + i * kPositions + 16 * lanes), score[lanes]);
  }
  for (Index p = 0; p < count; p += 16) {
    const V16 scaled = first_lanes(mul(score[p / 16], set1(shape.scale)), count - p, kNothing);
    store(scores + p, scaled);
    block_highest = max(block_highest, scaled);
  }
  const float highest = std::max(so_far.highest, max_of(block_highest));
  alignas(64) float correction[16];
  store(correction, exp(set1(so_far.highest - highest)));
  const V16 old = set1(correction[0]);
  V16 sums = zero();
  for (Index p = 0; p < count; p += 16) {
    const V16 e = first_lanes(exp(sub(load(scores + p), set1(highest))), count - p, 0.0f);
    store(scores + p, e);
    sums = add(sums, e);
  }
  so_far.total = so_far.total * correction[0] + sum(sums);
  so_far.highest = highest;
  for (Index i = 0; i < shape.value_dim; i += 64) {  // four sums at a time, each over the positions in order
    const Index parts = std::min<Index>(4, (shape.value_dim - i + 15) / 16);
    V16 acc[4];
    for (Index j = 0; j < parts; ++j) acc[j] = mul(load(so_far.values + i + 16 * j), old);
    for (Index p = 0; p < count; ++p) {
      const V16 weight = set1(scores[p]);
      const T* value = values + p * shape.value_step + i;
      for (Index j = 0; j < parts; ++j)
        acc[j] = fma(weight, load_kv(value + 16 * j, std::min<Index>(16, shape.value_dim - i - 16 * j)), acc[j]);
    }
    for (Index j = 0; j < parts; ++j) store(so_far.values + i + 16 * j, acc[j]);
  }
}

template <class T>
void attend(const AttentionShape& shape, const AttentionQuery* queries, Index num_queries, const T* keys,
            const T* values) {
  const Index padded = (shape.value_dim + 15) / 16 * 16;
  alignas(64) float turned[kMaxKeyDim * kPositions];
  std::fill(turned, turned + shape.key_dim * kPositions, 0.0f);
  alignas(64) float sums[kQueries * kMaxValueDim];
  std::fill(sums, sums + num_queries * padded, 0.0f);
  Running running[kQueries];
  Index longest = 0;
  for (Index n = 0; n < num_queries; ++n) {
    running[n] = {-std::numeric_limits<float>::max(), 0.0f, sums + n * padded};
    longest = std::max(longest, queries[n].length);
  }
  for (Index first = 0; first < longest; first += kPositions) {
    turn_keys(shape, keys + first * shape.key_step, std::min(kPositions, longest - first), turned);
    for (Index n = 0; n < num_queries; ++n) {
      const Index count = std::min(kPositions, queries[n].length - first);
      if (count > 0) attend_block(shape, queries[n].q, turned, values + first * shape.value_step, count, running[n]);
    }
  }
  for (Index n = 0; n < num_queries; ++n) {
    const V16 inverse = set1(1.0f / running[n].total);
    map(shape.value_dim, queries[n].out, [&](Index i, Index) { return mul(load(running[n].values + i), inverse); });
  }
}

void attention(const AttentionShape& shape, const AttentionQuery* queries, Index num_queries, const void* keys,
               const void* values) {
  if (shape.half) {
    attend(shape, queries, num_queries, static_cast<const uint16_t*>(keys), static_cast<const uint16_t*>(values));
  } else {
    attend(shape, queries, num_queries, static_cast<const float*>(keys), static_cast<const float*>(values));
  }
}

void weighted_sum(const float* parts, const float* weights, Index count, float* y, Index dim) {
  map(dim, y, [&](Index i, Index n) {
    V16 total = zero();
    for (Index j = 0; j < count; ++j) total = fma(set1(weights[j]), load_some(parts + j * dim + i, n), total);
    return total;
  });
}

// One row: Σ p_j stream_j with p = softmax over j of Σ rms_norm(stream_j) · weight.
void mix_streams(const float* const* streams, Index count, const float* weight, float eps, float* y, Index dim) {
  alignas(64) float share[kMaxStreams];
  float highest = -std::numeric_limits<float>::infinity(), total = 0.0f;
  for (Index j = 0; j < count; ++j) {
    const float size = std::sqrt(sum_of_squares(streams[j], dim) / static_cast<float>(dim) + eps);
    share[j] = dot(streams[j], weight, dim) / size;
    highest = std::max(highest, share[j]);
  }
  for (Index j = 0; j < count; ++j) {
    alignas(64) float lane[16];
    store(lane, exp(set1(share[j] - highest)));
    share[j] = lane[0];
    total += share[j];
  }
  for (Index j = 0; j < count; ++j) share[j] /= total;
  map(dim, y, [&](Index i, Index n) {
    V16 sum_of_streams = zero();
    for (Index j = 0; j < count; ++j) sum_of_streams = fma(set1(share[j]), load_some(streams[j] + i, n), sum_of_streams);
    return sum_of_streams;
  });
}

// The largest of 64·n numbers: a streaming read, for benchmarks.
float read_all(const float* data, Index count) {
  V16 best[4] = {zero(), zero(), zero(), zero()};
  for (Index i = 0; i + 64 <= count; i += 64)
    for (Index j = 0; j < 4; ++j) best[j] = max(best[j], load(data + i + 16 * j));
  return max_of(max(max(best[0], best[1]), max(best[2], best[3])));
}

}  // namespace

const Kernels kTable = {rms_norm,   l2_norm,  sigmoid_of, sigmoid_gate, swiglu,      situ,     decay,       rope,
                        short_conv, dot_rows, scan,       attention,    mix_streams, read_all, weighted_sum};

}  // namespace redraft::ISA
