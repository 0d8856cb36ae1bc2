// Products with tile registers, up to 16 rows a tile. What a tile computes for a row does not depend on how many rows
// it has, and reading the weights costs the same for one row as for sixteen.
#include <algorithm>

#include "gemm.h"
#include "groups.h"
#include "tiles.h"

namespace redraft::amx {
namespace {

constexpr std::ptrdiff_t kFewRows = 8;
constexpr std::ptrdiff_t kStep = kGroup * kBlock;  // numbers in a tile of activations or weights

// Tiles 0, 1 hold sums of the first rows, 2, 3 of the next ones; 4 and 5 their activations; 6, 7 weights.
void configure_for(std::ptrdiff_t rows, std::ptrdiff_t next_rows) {
  TileConfig config;
  for (int tile : {0, 1, 4}) config.set(tile, rows, 64);
  for (int tile : {2, 3, 5}) config.set(tile, next_rows, 64);
  for (int tile : {6, 7}) config.set(tile, 16, 64);
  configure(config);
}

// Asks for `size` bytes, a share at a time: those of the next blocks, while these pass over many rows.
struct Later {
  const uint8_t *next, *end;
  std::ptrdiff_t share;

  Later(const uint8_t* from, std::ptrdiff_t size, std::ptrdiff_t shares)
      : next(from), end(from + size), share((size / shares + 63) / 64 * 64) {}

  void ask_for_a_share() {
    const uint8_t* until = std::min(end, next + share);
    for (; next < until; next += 64) _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T1);
  }
};

// Two blocks of outputs, whose weights are read once for the rows of one or two tiles.
struct Pass {
  const uint8_t *w0, *w1;
  const uint16_t *a, *next;  // activations of the first tile, and of the second or null
  std::ptrdiff_t groups;
  bool ahead;  // whether the weights come from memory
};

void bf16_pass(const Pass& pass, Later& later) {
  _tile_zero(0);
  _tile_zero(1);
  if (pass.next) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::ptrdiff_t g = 0; g < pass.groups; ++g) {
    const uint8_t *p = pass.w0 + g * kStep * 2, *q = pass.w1 + g * kStep * 2;
    if (pass.ahead) {
      for (int line = 0; line < 1024; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(p + kAhead + line), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(q + kAhead + line), _MM_HINT_T0);
      }
    }
    later.ask_for_a_share();
    _tile_loadd(4, pass.a + g * kStep, 64);
    _tile_loadd(6, p, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, q, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (pass.next) {
      _tile_loadd(5, pass.next + g * kStep, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

void copy_out(const float* tile, float* y, std::ptrdiff_t stride, std::ptrdiff_t rows, std::ptrdiff_t width) {
  for (std::ptrdiff_t r = 0; r < rows; ++r) store_first(y + r * stride, load(tile + 16 * r), width);
}

void bf16_blocks(const Matrix& w, std::ptrdiff_t expert, const Rows& x, float* y, std::ptrdiff_t stride,
                 std::ptrdiff_t first, std::ptrdiff_t end) {
  alignas(64) float out[4][256];
  const std::ptrdiff_t passes = (x.count + 31) / 32, tile = x.columns * kTile;
  std::ptrdiff_t configured = -1;
  for (std::ptrdiff_t b = first; b < end; b += 2) {
    const bool pair = b + 1 < end;
    const uint8_t *w0 = w.block(expert, b), *w1 = w.block(expert, pair ? b + 1 : b);
    const std::ptrdiff_t coming = passes > 1 ? std::clamp<std::ptrdiff_t>(end - b - 2, 0, 2) : 0;
    Later later(w0 + 2 * w.block_bytes, coming * w.block_bytes, passes * x.groups());
    for (std::ptrdiff_t m = 0; m < x.count; m += 32) {
      const std::ptrdiff_t left = std::min<std::ptrdiff_t>(32, x.count - m);
      const std::ptrdiff_t rows[2] = {std::min<std::ptrdiff_t>(16, left), std::max<std::ptrdiff_t>(left - 16, 0)};
      if (left != configured) configure_for(rows[0], std::max<std::ptrdiff_t>(rows[1], 1));
      configured = left;
      const uint16_t* a = x.halves.data() + m * x.columns;
      bf16_pass({w0, w1, a, rows[1] ? a + tile : nullptr, x.groups(), m == 0 && (passes == 1 || b == first)}, later);
      _tile_stored(0, out[0], 64);
      _tile_stored(1, out[1], 64);
      if (rows[1] > 0) {
        _tile_stored(2, out[2], 64);
        _tile_stored(3, out[3], 64);
      }
      settle();
      for (int part = 0; part < (pair ? 4 : 3); part += pair ? 1 : 2) {
        const std::ptrdiff_t block = b + part % 2, row = m + part / 2 * 16;
        copy_out(out[part], y + row * stride + block * kBlock, stride, rows[part / 2],
                 std::min(kBlock, w.rows - block * kBlock));
      }
    }
  }
  _tile_release();
}

}  // namespace

void gemm_blocks(const Matrix& w, std::ptrdiff_t expert, const Rows& x, float* y, std::ptrdiff_t stride,
                 std::ptrdiff_t first, std::ptrdiff_t end) {
  settle();
  if (w.format == Format::f32 || (w.quantized() && x.count <= kFewRows)) {  // quantized: the same bits
    avx512::gemm_blocks(w, expert, x, y, stride, first, end);
  } else if (w.format == Format::bf16) {
    bf16_blocks(w, expert, x, y, stride, first, end);
  } else {
    quantized_blocks(w, expert, x, y, stride, first, end);
  }
}

void round_rows(const float* x, std::ptrdiff_t columns, std::ptrdiff_t first, std::ptrdiff_t end, Rows& out) {
  for (std::ptrdiff_t r = first; r < end; ++r) {
    for (std::ptrdiff_t k = 0; k < out.columns; k += 16) {
      const std::ptrdiff_t have = std::max<std::ptrdiff_t>(0, std::min<std::ptrdiff_t>(16, columns - k));
      const auto mask = static_cast<__mmask16>((1u << have) - 1);
      const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, x + r * columns + k));
      uint16_t* to = out.halves.data() + out.at(r, k / kGroup) * kGroup + k % kGroup;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<const __m256i&>(rounded));
    }
  }
}

}  // namespace redraft::amx
