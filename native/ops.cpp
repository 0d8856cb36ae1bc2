// Operations from pieces: preparation of activations, and the work of each operation spread over all threads.
#include <algorithm>
#include <cstring>

#include "cpu.h"
#include "gemm.h"
#include "kernels.h"
#include "threads.h"

namespace redraft {

const Kernels& kernels() { return isa() == Isa::avx2 ? avx2::kTable : avx512::kTable; }

GemmBlocks gemm_blocks_in_use() {
  switch (isa()) {
    case Isa::amx: return amx::gemm_blocks;
    case Isa::avx512: return avx512::gemm_blocks;
    default: return avx2::gemm_blocks;
  }
}

void prepare(Format format, const float* x, Index count, Index columns, Index padded_columns, Rows& out) {
  out.count = count;
  out.columns = padded_columns;
  const bool tiles = format == Format::bf16 && isa() == Isa::amx;
  const auto tile_rows = static_cast<size_t>((count + kTile - 1) / kTile * kTile);
  const auto groups = static_cast<size_t>(out.groups());
  if (format >= Format::q8) {
    out.bytes.resize(tile_rows * groups * kGroup);
    out.scales.resize(tile_rows * groups);
    out.totals.resize(tile_rows * groups);
    out.sums.resize(tile_rows * groups * 2);
  } else if (tiles) {
    out.halves.resize(tile_rows * groups * kGroup);
  } else {
    out.floats.resize(static_cast<size_t>(count * padded_columns));
  }
  const auto rows = [&](Index first, Index end) {
    if (format >= Format::q8) {
      (isa() == Isa::avx2 ? avx2::quantize_rows : avx512::quantize_rows)(x, columns, first, end, out);
    } else if (tiles) {
      amx::round_rows(x, columns, first, end, out);
    } else {
      for (Index r = first; r < end; ++r) {
        float* row = &out.floats[static_cast<size_t>(r * padded_columns)];
        std::copy(x + r * columns, x + (r + 1) * columns, row);
        std::fill(row + columns, row + padded_columns, 0.0f);
      }
    }
  };
  if (count * columns < kWorthThreads) {
    rows(0, count);
  } else {
    parallel_for(count, kTile, rows);  // rows of a tile share cache lines
  }
}

void linear(const Matrix& w, const float* x, Index count, const float* bias, float* y) {
  static thread_local Rows scratch;
  Rows& rows = scratch;  // the caller's, also on other threads
  prepare(w.format, x, count, w.columns, w.padded_columns, rows);
  const auto blocks = gemm_blocks_in_use();
  parallel_for(w.padded_rows / kBlock, 2, [&](Index first, Index end) {
    blocks(w, 0, rows, y, w.rows, first, end);
    if (bias == nullptr) return;
    const Index from = first * kBlock, to = std::min(w.rows, end * kBlock);
    for (Index r = 0; r < count; ++r)
      for (Index n = from; n < to; ++n) y[r * w.rows + n] += bias[n];
  });
}

}  // namespace redraft
