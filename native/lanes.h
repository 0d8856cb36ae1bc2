// Loops over numbers in lanes of sixteen.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "simd.h"

namespace redraft::ISA {

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

inline V16 load_some(const float* p, Index count) {
  if (count == 16) return load(p);
  alignas(64) float lane[16] = {};
  std::copy(p, p + count, lane);
  return load(lane);
}

// Defined in files of their own.
void scan(const Scan& call, const ScanWindow& window, Index head, Index column);
void attention(const AttentionShape& shape, const AttentionQuery* queries, Index num_queries, const void* keys,
               const void* values);

}  // namespace redraft::ISA
