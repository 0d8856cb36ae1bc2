// Operations of a row alone: products, norms, gates, the inputs of the delta rule.
#include "arrays.h"

#include <cmath>

namespace redraft {

constexpr Index kRowsAtOnce = 64;  // of a product: what they read and write stays in the cache

void product(const Matrix& w, const float* x, Index count, const float* bias, const float* residual, float* y) {
  for (Index first = 0; first < count; first += kRowsAtOnce) {
    const Index rows = std::min(kRowsAtOnce, count - first), size = rows * w.rows;
    float* out = y + first * w.rows;
    linear(w, x + first * w.columns, rows, bias, out);
    if (residual == nullptr) continue;
    const float* added = residual + first * w.rows;
    for_rows(size, 1, [&](Index from, Index end) {
      for (Index i = from; i < end; ++i) out[i] = added[i] + out[i];
    });
  }
}

void mlp(const MLP& block, const float* x, Index rows, const float* residual, float* y) {
  static thread_local std::vector<float> hidden, inner;
  const Index width = block.gate_up.rows / 2, most = std::min(kRowsAtOnce, rows), outputs = block.down.rows;
  hidden.resize(static_cast<size_t>(most * 2 * width));
  inner.resize(static_cast<size_t>(most * width));
  float *a = hidden.data(), *b = inner.data();  // the caller's, also on other threads
  for (Index from = 0; from < rows; from += kRowsAtOnce) {
    const Index count = std::min(kRowsAtOnce, rows - from);
    product(block.gate_up, x + from * block.gate_up.columns, count, block.gate_up_bias, nullptr, a);
    for_rows(count, width, [&](Index first, Index end) {
      for (Index r = first; r < end; ++r)
        block.gating(a + 2 * r * width, a + (2 * r + 1) * width, b + r * width, width);
    });
    product(block.down, b, count, block.down_bias, residual ? residual + from * outputs : nullptr, y + from * outputs);
  }
}

namespace {

void py_linear(const Matrix& w, Any x, std::optional<In> bias, std::optional<In> norm, float eps,
               std::optional<In> residual, Out y) {
  static thread_local std::vector<float> copies;
  const Strided rows = rows_apart(x);
  product(w, dense_rows(rows, data_of(norm), eps, copies), rows.rows, data_of(bias), data_of(residual), y.data());
}

void py_gated(Any gate, Any up, bool situ, float beta, float linear_beta, Out y) {
  const Strided a = rows_apart(gate), b = rows_apart(up);
  const Gating gating{situ, beta, linear_beta};
  for_rows(a.rows, a.width, [&](Index first, Index end) {
    for (Index r = first; r < end; ++r) gating(a.row(r), b.row(r), y.data() + r * a.width, a.width);
  });
}

void py_mlp(Any x, const Matrix& gate_up, std::optional<In> gate_up_bias, const Matrix& down,
            std::optional<In> down_bias, bool situ, float beta, float linear_beta, std::optional<In> norm, float eps,
            std::optional<In> residual, Out y) {
  static thread_local std::vector<float> copies;
  const Strided rows = rows_apart(x);
  mlp({gate_up, data_of(gate_up_bias), down, data_of(down_bias), {situ, beta, linear_beta}},
      dense_rows(rows, data_of(norm), eps, copies), rows.rows, data_of(residual), y.data());
}

// The first numbers of each row of the last axis, as many as there are weights, are normalised; the rest is copied.
void py_rms_norm(Any x, In weight, float eps, Out y) {
  const Strided rows = rows_apart(x);
  const Index last = dim(y, y.ndim() - 1), n = dim(weight, 0), parts = last == 0 ? 0 : rows.width / last;
  for_rows(rows.rows, rows.width, [&](Index first, Index end) {
    for (Index r = first; r < end; ++r) {
      for (Index part = 0; part < parts; ++part) {
        const float* in = rows.row(r) + part * last;
        float* out = y.data() + (r * parts + part) * last;
        kernels().rms_norm(in, weight.data(), eps, out, 1, n);
        std::copy(in + n, in + last, out + n);
      }
    }
  });
}

void py_sigmoid_gate(In x, Any gate, std::optional<In> norm, float eps, Out y) {
  const Strided gates = rows_apart(gate);
  const Index width = gates.width, head = dim(x, 2);
  for_rows(gates.rows, width, [&](Index first, Index end) {
    for (Index r = first; r < end; ++r) {
      const float* in = x.data() + r * width;
      float* out = y.data() + r * width;
      if (norm) {
        kernels().rms_norm(in, norm->data(), eps, out, width / head, head);
        in = out;
      }
      kernels().sigmoid_gate(in, gates.row(r), out, width);
    }
  });
}

// qkv [B, 3·H·K], f [B, H·K], beta [B, H] → q, k, v, decay [4, B, H, K] and betas [B, H].
void py_kda_inputs(In qkv, In f, Any beta, In neg_exp_a, std::optional<float> bound, float l2_eps, Out parts,
                   Out betas) {
  const Strided beta_rows = rows_apart(beta);
  const Index rows = dim(parts, 1), heads = dim(parts, 2), keys = dim(parts, 3), width = heads * keys;
  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(keys)));
  float *q = parts.data(), *k = q + rows * width, *v = k + rows * width, *decay = v + rows * width;
  for_rows(rows, 4 * width, [&](Index first, Index end) {
    for (Index r = first; r < end; ++r) {
      const float* in = qkv.data() + 3 * r * width;
      kernels().l2_norm(in, l2_eps, scale, q + r * width, heads, keys);
      kernels().l2_norm(in + width, l2_eps, 1.0f, k + r * width, heads, keys);
      std::copy_n(in + 2 * width, width, v + r * width);
      kernels().decay(f.data() + r * width, neg_exp_a.data(), bound ? &*bound : nullptr, decay + r * width, 1, heads,
                      keys);
      kernels().sigmoid(beta_rows.row(r), betas.data() + r * heads, heads);
    }
  });
}

// w [H, N, K], x [B, H, K + R] → y [B, H, N + R]; what follows the first K numbers of a head is copied.
void py_head_linear(In x, In w, Out y) {
  const Index heads = dim(w, 0), n = dim(w, 1), k = dim(w, 2), rows = dim(x, 0), step = dim(x, 2);
  for_rows(heads, n * k * rows, [&](Index first, Index end) {
    for (Index h = first; h < end; ++h) {
      for (Index r = 0; r < rows; ++r) {
        const float* in = x.data() + (r * heads + h) * step;
        float* out = y.data() + (r * heads + h) * (n + step - k);
        kernels().dot_rows(w.data() + h * n * k, in, out, n, k);
        std::copy(in + k, in + step, out + n);
      }
    }
  });
}

void py_mix_streams(const std::vector<In>& streams, In weight, float eps, In norm, float norm_eps, Out y) {
  const Index count = static_cast<Index>(streams.size()), n = dim(weight, 0);
  if (count > kMaxStreams) throw std::invalid_argument("too many streams");
  for_rows(dim(y, 0), n * count, [&](Index first, Index end) {
    const float* rows[kMaxStreams];
    for (Index r = first; r < end; ++r) {
      float* out = y.data() + r * n;
      for (Index j = 0; j < count; ++j) rows[j] = streams[static_cast<size_t>(j)].data() + r * n;
      kernels().mix_streams(rows, count, weight.data(), eps, out, n);
      kernels().rms_norm(out, norm.data(), norm_eps, out, 1, n);
    }
  });
}

}  // namespace

void bind_rows(nb::module_& m) {
  const auto none = [](const char* name) { return nb::arg(name).none(); };
  m.def("linear", &py_linear, nb::arg("w"), nb::arg("x"), none("bias"), none("norm"), nb::arg("eps"),
        none("residual"), nb::arg("y"), NoLock());
  m.def("gated", &py_gated, NoLock());
  m.def("mlp", &py_mlp, nb::arg("x"), nb::arg("gate_up"), none("gate_up_bias"), nb::arg("down"), none("down_bias"),
        nb::arg("situ"), nb::arg("beta"), nb::arg("linear_beta"), none("norm"), nb::arg("eps"), none("residual"),
        nb::arg("y"), NoLock());
  m.def("rms_norm", &py_rms_norm, NoLock());
  m.def("sigmoid_gate", &py_sigmoid_gate, nb::arg("x"), nb::arg("gate"), none("norm"), nb::arg("eps"), nb::arg("y"),
        NoLock());
  m.def("kda_inputs", &py_kda_inputs, nb::arg("qkv"), nb::arg("f"), nb::arg("beta"), nb::arg("neg_exp_a"),
        none("bound"), nb::arg("l2_eps"), nb::arg("parts"), nb::arg("betas"), NoLock());
  m.def("head_linear", &py_head_linear, NoLock());
  m.def("mix_streams", &py_mix_streams, NoLock());
}

}  // namespace redraft
