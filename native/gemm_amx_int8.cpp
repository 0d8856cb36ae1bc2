// Products of quantized weights in tiles: the exact integer sum of each group and part, then scaled and added as
// gemm_int8.cpp does it, to the same bits. The sums of a step are under way while those of the step before are scaled.
#include <algorithm>
#include <cstring>
#include <vector>

#include "gemm.h"
#include "groups.h"
#include "tiles.h"

namespace redraft::amx {
namespace {

// A block as tiles want it, unpacked while the first tile of rows passes and kept for the others.
struct Unpacked {
  std::vector<Bytes> numbers;  // [group][8], signed
  std::vector<V16> scales;     // [group][part]
  std::vector<V16> minima;     // [group]
};

template <Format F>
void unpack(const Groups& from, std::ptrdiff_t g, Unpacked& to) {
  for (int part = 0; part < kParts<F>; ++part)
    to.scales[static_cast<size_t>(g * kParts<F> + part)] = scale<F>(from, g, part);
  if constexpr (has_minima(F)) to.minima[static_cast<size_t>(g)] = minimum<F>(from, g);
  if constexpr (F != Format::q8) {
    Bytes* numbers = &to.numbers[static_cast<size_t>(8 * g)];
    for_numbers<F>(from.numbers + g * layout(F).numbers, [&](int j, Bytes q) {
      numbers[j] = {kExcess<F> ? _mm512_sub_epi8(q.v, _mm512_set1_epi8(kExcess<F>)) : q.v};
    });
  }
}

// Two sums of 16 rows × 16 outputs: of two groups, or of the two parts of one. Tiles 0 and 1 hold them.
struct Pair {
  alignas(64) int32_t sums[2][256];
};

template <Format F>
class Block {
 public:
  Block(const Matrix& w, const uint8_t* block, Unpacked& unpacked, std::ptrdiff_t groups)
      : from_(w.groups(block)), ahead_(block, w.block_bytes, groups), to_(unpacked), groups_(groups) {}

  // y [count][width] for the tile's rows, of which R are computed.
  template <int R>
  void rows(const Rows& x, std::ptrdiff_t row, float* y, std::ptrdiff_t stride, std::ptrdiff_t width) {
    constexpr std::ptrdiff_t kGroups = 2 / kParts<F>;  // of a pair
    const std::ptrdiff_t at = x.at(row, 0);
    const int8_t* bytes = x.bytes.data() + at * kGroup;
    Pair pairs[2];
    V16 acc[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r] = zero();
    begin(bytes, 0, row == 0, pairs[0]);
    int now = 0;
    for (std::ptrdiff_t g = 0; g < groups_; g += kGroups, now ^= 1) {
      if (g + kGroups < groups_) begin(bytes, g + kGroups, row == 0, pairs[now ^ 1]);
      settle();
      add<R>(pairs[now].sums[0], g, 0, x, at + g * kTile, acc);
      if (kParts<F> == 2) {
        add<R>(pairs[now].sums[1], g, 1, x, at + g * kTile, acc);
      } else if (g + 1 < groups_) {
        add<R>(pairs[now].sums[1], g + 1, 0, x, at + (g + 1) * kTile, acc);
      }
    }
    const std::ptrdiff_t count = std::min<std::ptrdiff_t>(R, x.count - row);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
      if (r < count) store_first(y + r * stride, acc[r], width);
  }

 private:
  const void* tile(std::ptrdiff_t g, int part) const {
    if (F == Format::q8) return from_.numbers + g * layout(F).numbers;
    return &to_.numbers[static_cast<size_t>(8 * g + 4 * part)];
  }

  void prepare(std::ptrdiff_t g) {
    ahead_.ask_for_a_group();
    unpack<F>(from_, g, to_);
  }

  void begin(const int8_t* bytes, std::ptrdiff_t g, bool first, Pair& out) {
    const bool two_groups = kParts<F> == 1 && g + 1 < groups_;
    if (first) {
      prepare(g);
      if (two_groups) prepare(g + 1);
    }
    settle();
    _tile_zero(0);
    _tile_loadd(4, bytes + g * kTile * kGroup, kGroup);
    _tile_loadd(6, tile(g, 0), 64);
    _tile_dpbssd(0, 4, 6);
    _tile_stored(0, out.sums[0], 64);
    if (kParts<F> == 1 && !two_groups) return;
    _tile_zero(1);
    _tile_loadd(5, bytes + (kParts<F> == 2 ? g * kTile * kGroup + 16 : (g + 1) * kTile * kGroup), kGroup);
    _tile_loadd(7, kParts<F> == 2 ? tile(g, 1) : tile(g + 1, 0), 64);
    _tile_dpbssd(1, 5, 7);
    _tile_stored(1, out.sums[1], 64);
  }

  template <int R>
  void add(const int32_t* sums, std::ptrdiff_t g, int part, const Rows& x, std::ptrdiff_t at, V16* acc) const {
    const V16 by = to_.scales[static_cast<size_t>(g * kParts<F> + part)];
    const float* scales = &x.scales[static_cast<size_t>(at)];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const I16 sum = {_mm512_load_si512(sums + 16 * r)};
      acc[r] = fma(mul(to_float(sum), by), set1(scales[r]), acc[r]);
    }
    if constexpr (has_minima(F)) {
      const V16 least = to_.minima[static_cast<size_t>(g)];
      const float* totals = &x.totals[static_cast<size_t>(at)];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) acc[r] = fma(least, set1(totals[r]), acc[r]);
    }
  }

  Groups from_;
  Ahead ahead_;
  Unpacked& to_;
  std::ptrdiff_t groups_;
};

}  // namespace

void quantized_blocks(const Matrix& w, std::ptrdiff_t expert, const Rows& x, float* y, std::ptrdiff_t stride,
                      std::ptrdiff_t first, std::ptrdiff_t end) {
  static thread_local Unpacked unpacked;
  const std::ptrdiff_t groups = x.groups();
  with_format(w.format, [&](auto format) {
    constexpr Format F = format();
    if (F != Format::q8) unpacked.numbers.resize(static_cast<size_t>(8 * groups));
    unpacked.scales.resize(static_cast<size_t>(kParts<F> * groups));
    if (has_minima(F)) unpacked.minima.resize(static_cast<size_t>(groups));
    TileConfig config;
    for (int tile : {0, 1}) config.set(tile, kTile, 64);
    for (int tile : {4, 5}) config.set(tile, kTile, 32 / kParts<F>);
    for (int tile : {6, 7}) config.set(tile, 8 / kParts<F>, 64);
    configure(config);
    for (std::ptrdiff_t b = first; b < end; ++b) {
      Block<F> block(w, w.block(expert, b), unpacked, groups);
      const std::ptrdiff_t width = std::min(kBlock, w.rows - b * kBlock);
      for (std::ptrdiff_t row = 0; row < x.count; row += kTile) {
        float* out = y + row * stride + b * kBlock;
        if (x.count - row > 8) {
          block.template rows<16>(x, row, out, stride, width);
        } else {
          block.template rows<8>(x, row, out, stride, width);
        }
      }
    }
    _tile_release();
  });
}

}  // namespace redraft::amx
