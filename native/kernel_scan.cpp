// The delta-rule scan, one block of value columns at a time.
#include <algorithm>

#include "lanes.h"

namespace redraft::ISA {
namespace {

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

}  // namespace

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

}  // namespace redraft::ISA
