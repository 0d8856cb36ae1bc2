// Attention of a few queries over the rows of one slot and key head, in blocks of 64 positions.
#include <algorithm>
#include <limits>

#include "lanes.h"

namespace redraft::ISA {
namespace {

constexpr Index kPositions = kAttentionPositions, kQueries = kAttentionQueries;

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

#ifdef __AVX512F__
constexpr int kTogether = 4;  // queries whose sums fit the registers
#else
constexpr int kTogether = 1;
#endif

// What one query has seen so far: its largest score, and sums of weights and of weighted values relative to it.
struct Running {
  float highest;
  V16 total;      // by lane
  float* values;  // [value_dim], padded to 16
};

// Queries that meet a block of positions side by side: each number of a key or value is loaded once for all of them.
// A query's own operations and their order are the same in any company.
template <int Q>
struct Tile {
  const AttentionQuery* queries;
  Running* running;
  Index count[Q];  // positions of this block
  alignas(64) float scores[Q][kPositions];
  V16 correction[Q];

  // Scores of the block; what lies beyond `count` is not used.
  void score(const AttentionShape& shape, const float* turned) {
    V16 sum[Q][4];
    for (int n = 0; n < Q; ++n)
      for (int lanes = 0; lanes < 4; ++lanes) sum[n][lanes] = zero();
    for (Index i = 0; i < shape.key_dim; ++i) {
      V16 key[4];
      for (int lanes = 0; lanes < 4; ++lanes) key[lanes] = load(turned + i * kPositions + 16 * lanes);
      for (int n = 0; n < Q; ++n) {
        const V16 number = set1(queries[n].q[i]);
        for (int lanes = 0; lanes < 4; ++lanes) sum[n][lanes] = fma(number, key[lanes], sum[n][lanes]);
      }
    }
    for (int n = 0; n < Q; ++n)
      for (int lanes = 0; lanes < 4; ++lanes) store(scores[n] + 16 * lanes, mul(sum[n][lanes], set1(shape.scale)));
  }

  // Scores become weights relative to the highest score so far.
  void weigh(int n) {
    constexpr float kNothing = -std::numeric_limits<float>::infinity();
    V16 score[4], block_highest = set1(kNothing);
    for (int lanes = 0; lanes < 4; ++lanes) {
      score[lanes] = first_lanes(load(scores[n] + 16 * lanes), std::max<Index>(0, count[n] - 16 * lanes), kNothing);
      block_highest = max(block_highest, score[lanes]);
    }
    const float highest = std::max(running[n].highest, max_of(block_highest));
    correction[n] = exp(set1(running[n].highest - highest));
    V16 total = mul(running[n].total, correction[n]);
    for (int lanes = 0; lanes < 4; ++lanes) {
      const Index rest = std::max<Index>(0, count[n] - 16 * lanes);
      const V16 weight = first_lanes(exp(sub(score[lanes], set1(highest))), rest, 0.0f);
      store(scores[n] + 16 * lanes, weight);
      total = add(total, weight);
    }
    running[n].highest = highest;
    running[n].total = total;
  }

  // Weighted values of dims [i, i + 16·P), each summed over the positions in order.
  template <class T, int P, bool whole>
  void add_values(const AttentionShape& shape, const T* values, Index i) {
    V16 sum[Q][P];
    Index common = kPositions;
    for (int n = 0; n < Q; ++n) {
      common = std::min(common, count[n]);
      for (int j = 0; j < P; ++j) sum[n][j] = mul(load(running[n].values + i + 16 * j), correction[n]);
    }
    const Index last = whole ? 16 : shape.value_dim - i - 16 * (P - 1);
    const auto value = [&](Index p, int j) {
      return load_kv(values + p * shape.value_step + i + 16 * j, whole || j < P - 1 ? 16 : last);
    };
    for (Index p = 0; p < common; ++p) {
      V16 row[P];
      for (int j = 0; j < P; ++j) row[j] = value(p, j);
      for (int n = 0; n < Q; ++n)
        for (int j = 0; j < P; ++j) sum[n][j] = fma(set1(scores[n][p]), row[j], sum[n][j]);
    }
    for (int n = 0; n < Q; ++n) {
      for (Index p = common; p < count[n]; ++p)
        for (int j = 0; j < P; ++j) sum[n][j] = fma(set1(scores[n][p]), value(p, j), sum[n][j]);
      for (int j = 0; j < P; ++j) store(running[n].values + i + 16 * j, sum[n][j]);
    }
  }
};

template <class T, int Q>
void attend_block(const AttentionShape& shape, const AttentionQuery* queries, Running* running, const float* turned,
                  const T* values, Index first) {
  Tile<Q> tile{queries, running, {}, {}, {}};
  for (int n = 0; n < Q; ++n) tile.count[n] = std::min(kPositions, queries[n].length - first);
  tile.score(shape, turned);
  for (int n = 0; n < Q; ++n) tile.weigh(n);
  Index i = 0;
  for (; i + 64 <= shape.value_dim; i += 64) tile.template add_values<T, 4, true>(shape, values, i);
  for (; i + 16 <= shape.value_dim; i += 16) tile.template add_values<T, 1, true>(shape, values, i);
  if (i < shape.value_dim) tile.template add_values<T, 1, false>(shape, values, i);
}

// The same for `count` queries, at most Q.
template <class T, int Q>
void attend_some(Index count, const AttentionShape& shape, const AttentionQuery* queries, Running* running,
                 const float* turned, const T* values, Index first) {
  if (count == Q) return attend_block<T, Q>(shape, queries, running, turned, values, first);
  if constexpr (Q > 1) attend_some<T, Q - 1>(count, shape, queries, running, turned, values, first);
}

// Queries in the order of their lengths: those that the block does not reach come first.
template <class T>
void attend(const AttentionShape& shape, const AttentionQuery* queries, Index num_queries, const T* keys,
            const T* values) {
  const Index padded = (shape.value_dim + 15) / 16 * 16;
  alignas(64) float turned[kMaxKeyDim * kPositions];
  std::fill(turned, turned + shape.key_dim * kPositions, 0.0f);
  alignas(64) float sums[kQueries * kMaxValueDim];
  std::fill(sums, sums + num_queries * padded, 0.0f);
  Running running[kQueries];
  for (Index n = 0; n < num_queries; ++n) running[n] = {-std::numeric_limits<float>::max(), zero(), sums + n * padded};
  const Index longest = queries[num_queries - 1].length;
  Index n = 0;
  for (Index first = 0; first < longest; first += kPositions) {
    turn_keys(shape, keys + first * shape.key_step, std::min(kPositions, longest - first), turned);
    const T* block = values + first * shape.value_step;
    while (queries[n].length <= first) ++n;
    for (Index m = n; m < num_queries; m += kTogether) {
      const Index rest = std::min<Index>(kTogether, num_queries - m);
      attend_some<T, kTogether>(rest, shape, queries + m, running + m, turned, block, first);
    }
  }
  for (n = 0; n < num_queries; ++n) {
    const V16 inverse = set1(1.0f / sum(running[n].total));
    map(shape.value_dim, queries[n].out, [&](Index i, Index) { return mul(load(running[n].values + i), inverse); });
  }
}

}  // namespace

void attention(const AttentionShape& shape, const AttentionQuery* queries, Index num_queries, const void* keys,
               const void* values) {
  if (shape.half) {
    attend(shape, queries, num_queries, static_cast<const uint16_t*>(keys), static_cast<const uint16_t*>(values));
  } else {
    attend(shape, queries, num_queries, static_cast<const float*>(keys), static_cast<const float*>(values));
  }
}

}  // namespace redraft::ISA
