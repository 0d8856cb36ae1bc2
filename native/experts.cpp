// A mixture of experts: which, and what they say.
#include "arrays.h"

#include <limits>

namespace redraft {
namespace {

void py_route(In logits, std::optional<In> bias, float scale, bool normalise, IntsOut ids, Out weights) {
  const Index rows = dim(logits, 0), experts = dim(logits, 1), chosen = dim(weights, 1);
  for_rows(rows, experts * chosen, [&](Index first, Index end) {
    std::vector<float> scores(static_cast<size_t>(experts)), ranked(scores);
    for (Index r = first; r < end; ++r) {
      kernels().sigmoid(logits.data() + r * experts, scores.data(), experts);
      for (size_t e = 0; e < scores.size(); ++e) ranked[e] = bias ? scores[e] + bias->data()[e] : scores[e];
      float* share = weights.data() + r * chosen;
      float total = 0;
      for (Index j = 0; j < chosen; ++j) {
        const auto best = std::max_element(ranked.begin(), ranked.end());  // the first of equals
        const auto e = best - ranked.begin();
        *best = -std::numeric_limits<float>::infinity();
        ids.data()[r * chosen + j] = e;
        share[j] = scores[static_cast<size_t>(e)];
        total += share[j];
      }
      const float divisor = total + 1e-20f;
      for (Index j = 0; j < chosen; ++j) share[j] = (normalise ? share[j] / divisor : share[j]) * scale;
    }
  });
}

// Experts of all rows: each chosen expert's weights are read once for all the rows that chose it.
void py_experts(Any x_rows, Ints ids, In weights, const Matrix& gate, const Matrix& up, const Matrix& down, bool situ,
                float beta, float linear_beta, Out y) {
  const Strided x = rows_apart(x_rows);
  const Index rows = x.rows, k = x.width, chosen = dim(weights, 1), inner = gate.rows, n = down.rows;
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
    for (Index i = 0; i < count; ++i) std::copy_n(x.row(places[static_cast<size_t>(i)] / chosen), k, &inputs[static_cast<size_t>(i * k)]);
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

}  // namespace

void bind_experts(nb::module_& m) {
  m.def("route", &py_route, nb::arg("logits"), nb::arg("bias").none(), nb::arg("scale"), nb::arg("normalise"),
        nb::arg("ids"), nb::arg("weights"), NoLock());
  m.def("experts", &py_experts, NoLock());
}

}  // namespace redraft
