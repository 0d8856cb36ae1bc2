// NumPy arrays as the operations take them. Arrays come in C order, or with rows that lie apart where the type is `Any`;
// outputs are allocated by redraft/ops/native.py. The interpreter lock is released while an operation runs.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <vector>

#include "gemm.h"
#include "kernels.h"
#include "threads.h"

namespace redraft {

namespace nb = nanobind;

using In = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>;
using IntsOut = nb::ndarray<int64_t, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const bool, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>;
using Any = nb::ndarray<nb::device::cpu>;
using NoLock = nb::call_guard<nb::gil_scoped_release>;

// Rows on all threads where there is enough to do.
template <class Body>
void for_rows(Index rows, Index numbers_per_row, const Body& body) {
  if (rows * numbers_per_row < kWorthThreads) {
    body(0, rows);
  } else {
    parallel_for(rows, 1, body);
  }
}

template <class Array>
Index dim(const Array& a, size_t axis) {
  return static_cast<Index>(a.shape(axis));
}

inline const float* data_of(const std::optional<In>& a) { return a ? a->data() : nullptr; }

// Rows of `width` dense numbers, which may lie apart: a part of the columns of a larger array.
struct Strided {
  const float* data;
  Index rows, width, step;

  const float* row(Index r) const { return data + r * step; }
};

inline Strided rows_apart(const Any& x) {
  Index width = 1;
  for (size_t axis = x.ndim(); axis-- > 1;) {
    if (x.stride(axis) != width && x.shape(axis) != 1) throw std::invalid_argument("a row is not dense");
    width *= dim(x, axis);
  }
  if (x.dtype() != nb::dtype<float>()) throw std::invalid_argument("not float32");
  return {static_cast<const float*>(x.data()), dim(x, 0), width, x.stride(0)};
}

// The rows one after another: where they lie, or copied to `copies`, normalised if there is a norm.
inline const float* dense_rows(const Strided& x, const float* norm, float eps, std::vector<float>& copies) {
  if (norm == nullptr && (x.step == x.width || x.rows == 1)) return x.data;
  copies.resize(static_cast<size_t>(x.rows * x.width));
  for_rows(x.rows, x.width, [&](Index first, Index end) {
    for (Index r = first; r < end; ++r) {
      float* y = &copies[static_cast<size_t>(r * x.width)];
      if (norm != nullptr) {
        kernels().rms_norm(x.row(r), norm, eps, y, 1, x.width);
      } else {
        std::copy_n(x.row(r), x.width, y);
      }
    }
  });
  return copies.data();
}

// y = residual + (W x + bias) for dense rows, a few at a time.
void product(const Matrix& w, const float* x, Index count, const float* bias, const float* residual, float* y);

struct Gating {
  bool situ;
  float beta, linear_beta;

  void operator()(const float* gate, const float* up, float* y, Index count) const {
    if (situ) {
      kernels().situ(gate, up, beta, linear_beta, y, count);
    } else {
      kernels().swiglu(gate, up, y, count);
    }
  }
};

struct MLP {
  const Matrix& gate_up;
  const float* gate_up_bias;
  const Matrix& down;
  const float* down_bias;
  Gating gating;
};

// y = residual + W_down gated(W_gate x, W_up x) for dense rows.
void mlp(const MLP& block, const float* x, Index rows, const float* residual, float* y);

void bind_rows(nb::module_& m);
void bind_experts(nb::module_& m);
void bind_state(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_sampling(nb::module_& m);

}  // namespace redraft
