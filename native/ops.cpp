// Operations from pieces: preparation of activations, and the work of each operation spread over all threads.
#include <algorithm>
#include <cstring>

#include "cpu.h"
#include "gemm.h"
#include "halves.h"
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
  out.padded = (count + 15) / 16 * 16;
  out.columns = padded_columns;
  if (format >= Format::q8) {
    const Index groups = padded_columns / kGroup;
    out.bytes.resize(static_cast<size_t>(out.padded * padded_columns));
    out.scales.resize(static_cast<size_t>(count * groups));
    out.sums.resize(static_cast<size_t>(count * groups));
    (isa() == Isa::avx2 ? avx2::quantize_rows : avx512::quantize_rows)(x, count, columns, out);
  } else if (format == Format::bf16 && isa() == Isa::amx) {
    out.halves.assign(static_cast<size_t>(out.padded * padded_columns), 0);
    for (Index r = 0; r < count; ++r)
      for (Index k = 0; k < columns; ++k) out.halves[r * padded_columns + k] = float_to_bf16(x[r * columns + k]);
  } else {
    out.floats.assign(static_cast<size_t>(count * padded_columns), 0.0f);
    for (Index r = 0; r < count; ++r) std::copy(x + r * columns, x + (r + 1) * columns, &out.floats[r * padded_columns]);
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
