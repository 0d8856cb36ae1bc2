// The Python face of the native operations. Arrays come in C order and are checked by redraft/ops/native.py; outputs
// are allocated there. The interpreter lock is released while an operation runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "cpu.h"
#include "gemm.h"
#include "kernels.h"
#include "matrix.h"
#include "threads.h"

namespace nb = nanobind;
using namespace redraft;

using In = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const bool, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>;
using Any = nb::ndarray<nb::device::cpu>;
using NoLock = nb::call_guard<nb::gil_scoped_release>;

namespace {

// Rows on all threads where there is enough to do.
template <class Body>
void for_rows(Index rows, Index numbers_per_row, const Body& body) {
  if (rows * numbers_per_row < kWorthThreads) {
    body(0, rows);
  } else {
    parallel_for(rows, 1, body);
  }
}

Index dim(const In& a, size_t axis) { return static_cast<Index>(a.shape(axis)); }

Index rows_of(const In& x) {
  Index rows = 1;
  for (size_t axis = 0; axis + 1 < x.ndim(); ++axis) rows *= dim(x, axis);
  return rows;
}

void py_linear(const Matrix& w, In x, std::optional<In> bias, Out y) {
  linear(w, x.data(), dim(x, 0), bias ? bias->data() : nullptr, y.data());
}

void py_embed(const Matrix& w, Ints tokens, Out y) {
  for (size_t i = 0; i < tokens.shape(0); ++i) unpack_row(w, tokens.data()[i], y.data() + static_cast<Index>(i) * w.columns);
}

void py_rms_norm(In x, In weight, float eps, Out y) {
  const Index n = dim(x, x.ndim() - 1);
  for_rows(rows_of(x), n, [&](Index first, Index end) {
    kernels().rms_norm(x.data() + first * n, weight.data(), eps, y.data() + first * n, end - first, n);
  });
}

void py_l2_norm(In x, float eps, Out y) {
  const Index n = dim(x, x.ndim() - 1);
  for_rows(rows_of(x), n, [&](Index first, Index end) {
    kernels().l2_norm(x.data() + first * n, eps, y.data() + first * n, end - first, n);
  });
}

void py_sigmoid(In x, Out y) {
  for_rows(static_cast<Index>(x.size()) / 16 + 1, 16, [&](Index first, Index end) {
    const Index from = first * 16, to = std::min<Index>(static_cast<Index>(x.size()), end * 16);
    if (from < to) kernels().sigmoid(x.data() + from, y.data() + from, to - from);
  });
}

// Rows of `width` dense numbers, which may lie apart: a part of the columns of a larger array.
struct Strided {
  const float* data;
  Index rows, width, step;
};

Strided rows_apart(const Any& x) {
  Index width = 1;
  for (size_t axis = x.ndim(); axis-- > 1;) {
    if (x.stride(axis) != width && x.shape(axis) != 1) throw std::invalid_argument("a row is not dense");
    width *= static_cast<Index>(x.shape(axis));
  }
  if (x.dtype() != nb::dtype<float>()) throw std::invalid_argument("not float32");
  return {static_cast<const float*>(x.data()), static_cast<Index>(x.shape(0)), width, x.stride(0)};
}

void py_gated(Any gate, Any up, bool situ, float beta, float linear_beta, Out y) {
  const Strided a = rows_apart(gate), b = rows_apart(up);
  for_rows(a.rows, a.width, [&](Index first, Index end) {
    for (Index r = first; r < end; ++r) {
      const float *p = a.data + r * a.step, *q = b.data + r * b.step;
      if (situ) {
        kernels().situ(p, q, beta, linear_beta, y.data() + r * a.width, a.width);
      } else {
        kernels().swiglu(p, q, y.data() + r * a.width, a.width);
      }
    }
  });
}

void py_decay(In f, In neg_exp_a, std::optional<float> bound, Out y) {
  const Index heads = dim(f, 1), n = dim(f, 2);
  for_rows(dim(f, 0), heads * n, [&](Index first, Index end) {
    kernels().decay(f.data() + first * heads * n, neg_exp_a.data(), bound ? &*bound : nullptr,
                    y.data() + first * heads * n, end - first, heads, n);
  });
}

void py_rope(Any x, In cos, In sin, Out y) {
  const Strided rows = rows_apart(x);
  const Index heads = static_cast<Index>(x.shape(1)), n = static_cast<Index>(x.shape(2)), half = dim(cos, 1);
  for_rows(rows.rows, rows.width, [&](Index first, Index end) {
    for (Index r = first; r < end; ++r)
      kernels().rope(rows.data + r * rows.step, cos.data() + r * half, sin.data() + r * half,
                     y.data() + r * rows.width, heads, n, half);
  });
}

void py_short_conv(In x, In taps, In history, Ints starts, Out y) {
  const Index channels = dim(x, 1), width = dim(taps, 0), windows = static_cast<Index>(starts.shape(0)) - 1;
  const auto run = [&](Index first, Index end) {
    for (Index w = 0; w < windows; ++w) {
      const Index row = starts.data()[w], rows = starts.data()[w + 1] - row;
      kernels().short_conv(x.data() + row * channels, taps.data(), history.data() + w * (width - 1) * channels,
                           y.data() + row * channels, rows, channels, width, first, end);
    }
  };
  if (dim(x, 0) * channels * width < kWorthThreads) {
    run(0, channels);
  } else {
    parallel_for(channels, 16, run);
  }
}

// w [H, N, K], x [B, H, K] → y [B, H, N].
void py_head_linear(In x, In w, Out y) {
  const Index heads = dim(w, 0), n = dim(w, 1), k = dim(w, 2), rows = dim(x, 0);
  for_rows(heads, n * k * rows, [&](Index first, Index end) {
    for (Index h = first; h < end; ++h)
      for (Index r = 0; r < rows; ++r)
        kernels().dot_rows(w.data() + h * n * k, x.data() + (r * heads + h) * k, y.data() + (r * heads + h) * n, n, k);
  });
}

struct ScanPlan {
  Scan call;
  std::vector<ScanWindow> windows;
};

// All pieces of a scan: windows × heads × blocks of 16 value columns.
void run_scan(const ScanPlan& plan) {
  const ScanShape& shape = plan.call.shape;
  const Index blocks = (shape.value_dim + 15) / 16, per_window = shape.value_heads * blocks;
  const Index pieces = static_cast<Index>(plan.windows.size()) * per_window;
  parallel_for(pieces, 1, [&](Index first, Index end) {
    for (Index piece = first; piece < end; ++piece) {
      const Index rest = piece % per_window;
      kernels().scan(plan.call, plan.windows[static_cast<size_t>(piece / per_window)], rest / blocks,
                     rest % blocks * 16);
    }
  });
}

// Decays and keys of new records are written when every piece has read the old ones.
void write_records(const ScanPlan& plan, float* decay, float* k) {
  const Scan& call = plan.call;
  const Index decays = call.shape.value_heads * call.shape.decay_dim, keys = call.shape.heads * call.shape.key_dim;
  for (const ScanWindow& window : plan.windows) {
    if (window.advance) continue;
    for (Index row = window.first; row < window.end; ++row) {
      const Index token = row - window.first;
      if (call.num_planes && (window.plane + 1 + token) % call.num_planes != window.last) continue;
      const Index record = window.slot * call.num_records + (call.num_planes ? 0 : window.num_replayed + token);
      std::copy(call.decay + row * decays, call.decay + (row + 1) * decays, decay + record * decays);
      std::copy(call.k + row * keys, call.k + (row + 1) * keys, k + record * keys);
    }
  }
}

Scan scan_call(const In& q, const In& k, const In& v, const In& decay, const In& beta, Out& out, Out& state) {
  Scan call{};
  call.shape = {dim(q, 1), dim(v, 1), dim(q, 2), dim(v, 2), dim(decay, 2)};
  call.q = q.data();
  call.k = k.data();
  call.v = v.data();
  call.decay = decay.data();
  call.beta = beta.data();
  call.out = out.data();
  call.state = state.data();
  return call;
}

void py_delta_scan(In q, In k, In v, In decay, In beta, Ints slots, Ints starts, Out state, std::optional<Out> rd,
                   std::optional<Out> rk, std::optional<Out> ru, Ints folded, Ints replayed, Flags advance, Out out) {
  ScanPlan plan{scan_call(q, k, v, decay, beta, out, state), {}};
  if (rd) {
    plan.call.record_decay = rd->data();
    plan.call.record_k = rk->data();
    plan.call.record_u = ru->data();
    plan.call.num_records = static_cast<Index>(rd->shape(1));
  }
  for (size_t w = 0; w < slots.shape(0); ++w)
    plan.windows.push_back({slots.data()[w], starts.data()[w], starts.data()[w + 1], folded.data()[w],
                            replayed.data()[w], advance.data()[w], 0, 0});
  run_scan(plan);
  if (rd) write_records(plan, rd->data(), rk->data());
}

void py_delta_scan_planes(In q, In k, In v, In decay, In beta, Ints slots, Ints starts, Out planes,
                          std::optional<Out> td, std::optional<Out> tk, std::optional<Out> tu, Ints plane,
                          Flags advance, Ints last, Out out) {
  ScanPlan plan{scan_call(q, k, v, decay, beta, out, planes), {}};
  plan.call.num_planes = static_cast<Index>(planes.shape(1));
  plan.call.num_records = 1;
  if (td) {
    plan.call.record_decay = td->data();
    plan.call.record_k = tk->data();
    plan.call.record_u = tu->data();
  }
  for (size_t w = 0; w < slots.shape(0); ++w)
    plan.windows.push_back({slots.data()[w], starts.data()[w], starts.data()[w + 1], 0, 0, advance.data()[w],
                            plane.data()[w], last.data()[w]});
  run_scan(plan);
  if (td) write_records(plan, td->data(), tk->data());
}

// keys [S, context, G, K] and values [S, context, G, V]: float32, or bf16 as uint16; only the last axis is dense.
void py_attention(In q, Any keys, Any values, Ints slots, Ints starts, Ints positions, float scale, Out out) {
  AttentionShape shape{};
  shape.heads = dim(q, 1);
  shape.groups = static_cast<Index>(keys.shape(2));
  shape.key_dim = dim(q, 2);
  shape.value_dim = static_cast<Index>(values.shape(3));
  shape.key_step = keys.stride(1);
  shape.value_step = values.stride(1);
  shape.key_group = keys.stride(2);
  shape.value_group = values.stride(2);
  shape.scale = scale;
  if (shape.key_dim > kMaxKeyDim || shape.value_dim > kMaxValueDim) throw std::invalid_argument("head too wide");
  shape.half = keys.dtype() == nb::dtype<uint16_t>();
  const Index size = shape.half ? 2 : 4, windows = static_cast<Index>(slots.shape(0));
  const Index per_group = shape.heads / shape.groups, rows_a_piece = std::max<Index>(1, kAttentionQueries / per_group);
  struct Piece {
    Index slot, first, end, head, end_head;
  };
  std::vector<Piece> pieces;
  Index work = 0;
  for (Index w = 0; w < windows; ++w) {
    for (Index row = starts.data()[w]; row < starts.data()[w + 1]; row += rows_a_piece) {
      const Index end = std::min(starts.data()[w + 1], row + rows_a_piece);
      work += (positions.data()[end - 1] + 1) * shape.key_dim * (end - row) * shape.heads;
      for (Index group = 0; group < shape.heads; group += per_group)
        for (Index head = group; head < group + per_group; head += kAttentionQueries)
          pieces.push_back({slots.data()[w], row, end, head, std::min(group + per_group, head + kAttentionQueries)});
    }
  }
  const auto run = [&](const Piece& piece) {
    AttentionQuery queries[kAttentionQueries];
    Index count = 0;
    for (Index row = piece.first; row < piece.end; ++row) {
      for (Index head = piece.head; head < piece.end_head; ++head) {
        const Index at = row * shape.heads + head;
        queries[count++] = {q.data() + at * shape.key_dim, out.data() + at * shape.value_dim, positions.data()[row] + 1};
      }
    }
    const Index group = piece.head / per_group;
    const auto* k =
        static_cast<const uint8_t*>(keys.data()) + (piece.slot * keys.stride(0) + group * shape.key_group) * size;
    const auto* v =
        static_cast<const uint8_t*>(values.data()) + (piece.slot * values.stride(0) + group * shape.value_group) * size;
    kernels().attention(shape, queries, count, k, v);
  };
  const auto some = [&](Index first, Index end) {
    for (Index i = first; i < end; ++i) run(pieces[static_cast<size_t>(i)]);
  };
  if (work < kWorthThreads) {
    some(0, static_cast<Index>(pieces.size()));
  } else {
    parallel_for(static_cast<Index>(pieces.size()), 1, some);
  }
}

// Experts of all rows: each chosen expert's weights are read once for all the rows that chose it.
void py_experts(In x, Ints ids, In weights, const Matrix& gate, const Matrix& up, const Matrix& down, bool situ,
                float beta, float linear_beta, Out y) {
  const Index rows = dim(x, 0), k = dim(x, 1), chosen = dim(weights, 1), inner = gate.rows, n = down.rows;
  std::vector<float> parts(static_cast<size_t>(rows * chosen * n));
  std::vector<float> inputs, a, b, out;
  Rows packed;
  const auto blocks = gemm_blocks_in_use();
  const auto product = [&](const Matrix& w, Index expert, const std::vector<float>& in, Index count,
                           std::vector<float>& result) {
    prepare(w.format, in.data(), count, w.columns, w.padded_columns, packed);
    result.resize(static_cast<size_t>(count * w.rows));
    parallel_for(w.padded_rows / kBlock, 2, [&](Index first, Index end) {
      blocks(w, expert, packed, result.data(), w.rows, first, end);
    });
  };
  for (Index expert = 0; expert < gate.experts; ++expert) {
    std::vector<Index> places;  // row · chosen + rank
    for (Index i = 0; i < rows * chosen; ++i)
      if (ids.data()[i] == expert) places.push_back(i);
    const Index count = static_cast<Index>(places.size());
    if (count == 0) continue;
    inputs.resize(static_cast<size_t>(count * k));
    for (Index i = 0; i < count; ++i) std::copy_n(x.data() + places[static_cast<size_t>(i)] / chosen * k, k, &inputs[static_cast<size_t>(i * k)]);
    product(gate, expert, inputs, count, a);
    product(up, expert, inputs, count, b);
    for_rows(count, inner, [&](Index first, Index end) {
      float *p = a.data() + first * inner, *q = b.data() + first * inner;
      if (situ) {
        kernels().situ(p, q, beta, linear_beta, p, (end - first) * inner);
      } else {
        kernels().swiglu(p, q, p, (end - first) * inner);
      }
    });
    product(down, expert, a, count, out);
    for (Index i = 0; i < count; ++i) std::copy_n(&out[static_cast<size_t>(i * n)], n, &parts[static_cast<size_t>(places[static_cast<size_t>(i)] * n)]);
  }
  for_rows(rows, chosen * n, [&](Index first, Index end) {
    for (Index r = first; r < end; ++r)
      kernels().weighted_sum(&parts[static_cast<size_t>(r * chosen * n)], weights.data() + r * chosen, chosen,
                             y.data() + r * n, n);
  });
}

void py_mix_streams(const std::vector<In>& streams, In weight, float eps, Out y) {
  const Index count = static_cast<Index>(streams.size()), n = dim(weight, 0);
  if (count > kMaxStreams) throw std::invalid_argument("too many streams");
  for_rows(static_cast<Index>(y.shape(0)), n * count, [&](Index first, Index end) {
    const float* rows[kMaxStreams];
    for (Index r = first; r < end; ++r) {
      for (Index j = 0; j < count; ++j) rows[j] = streams[static_cast<size_t>(j)].data() + r * n;
      kernels().mix_streams(rows, count, weight.data(), eps, y.data() + r * n, n);
    }
  });
}

Matrix* py_pack(Bytes data, const std::string& encoding, Index experts, Index rows, Index columns) {
  return pack(data.data(), encoding, experts, rows, columns).release();  // Python owns it
}

// A streaming read of all numbers on all threads, for benchmarks → whether any is above zero.
bool py_read_all(In data) {
  std::atomic<bool> positive{false};
  parallel_for(static_cast<Index>(data.size()) / 64, 512, [&](Index first, Index end) {
    if (kernels().read_all(data.data() + first * 64, (end - first) * 64) > 0) positive = true;
  });
  return positive;
}

}  // namespace

NB_MODULE(_native, m) {
  nb::class_<Matrix>(m, "Matrix")
      .def_ro("num_bytes", &Matrix::num_bytes)
      .def_ro("experts", &Matrix::experts)
      .def_ro("rows", &Matrix::rows)
      .def_ro("columns", &Matrix::columns);
  m.def("pack", &py_pack, NoLock());
  m.def("linear", &py_linear, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), NoLock());
  m.def("embed", &py_embed, NoLock());
  m.def("rms_norm", &py_rms_norm, NoLock());
  m.def("l2_norm", &py_l2_norm, NoLock());
  m.def("sigmoid", &py_sigmoid, NoLock());
  m.def("gated", &py_gated, NoLock());
  m.def("decay", &py_decay, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), NoLock());
  m.def("rope", &py_rope, NoLock());
  m.def("short_conv", &py_short_conv, NoLock());
  m.def("head_linear", &py_head_linear, NoLock());
  m.def("delta_scan", &py_delta_scan, NoLock());
  m.def("delta_scan_planes", &py_delta_scan_planes, NoLock());
  m.def("attention", &py_attention, NoLock());
  m.def("experts", &py_experts, NoLock());
  m.def("mix_streams", &py_mix_streams, NoLock());
  m.def("read_all", &py_read_all, NoLock());
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads);
  m.def("isa", [] { return isa_name(isa()); });
  m.def("best_isa", [] { return isa_name(best_isa()); });
  m.def("use_isa", &use_isa);
}
