// A mixture of experts: which, and what they say.
#include "arrays.h"

#include <limits>

namespace redraft {
namespace {

// How experts are chosen, and what they share.
struct Routing {
  const float* bias;
  Index top_k;
  float scale;
  bool normalise;

  // logits [rows, experts] → ids and weights [rows, top_k].
  void operator()(const float* logits, Index rows, Index experts, int64_t* ids, float* weights) const {
    for_rows(rows, experts * top_k, [&](Index first, Index end) {
      std::vector<float> scores(static_cast<size_t>(experts)), ranked(scores);
      for (Index r = first; r < end; ++r) {
        kernels().sigmoid(logits + r * experts, scores.data(), experts);
        for (size_t e = 0; e < scores.size(); ++e) ranked[e] = bias ? scores[e] + bias[e] : scores[e];
        float *share = weights + r * top_k, total = 0;
        for (Index j = 0; j < top_k; ++j) {
          const auto best = std::max_element(ranked.begin(), ranked.end());  // the first of equals
          const auto e = best - ranked.begin();
          *best = -std::numeric_limits<float>::infinity();
          ids[r * top_k + j] = e;
          share[j] = scores[static_cast<size_t>(e)];
          total += share[j];
        }
        const float divisor = total + 1e-20f;
        for (Index j = 0; j < top_k; ++j) share[j] = (normalise ? share[j] / divisor : share[j]) * scale;
      }
    });
  }
};

void py_route(In logits, std::optional<In> bias, float scale, bool normalise, IntsOut ids, Out weights) {
  const Routing routing{data_of(bias), dim(weights, 1), scale, normalise};
  routing(logits.data(), dim(logits, 0), dim(logits, 1), ids.data(), weights.data());
}

struct Experts {
  const Matrix &gate, &up, &down;
  Gating gating;

  // Each chosen expert's weights are read once for all the rows that chose it.
  void operator()(const Strided& x, const int64_t* ids, const float* weights, Index chosen, float* y) const {
    const Index rows = x.rows, k = x.width, inner = gate.rows, n = down.rows;
    std::vector<float> parts(static_cast<size_t>(rows * chosen * n)), inputs, a, b, out;
    Rows packed;
    const auto blocks = gemm_blocks_in_use();
    const auto expert_product = [&](const Matrix& w, Index expert, const std::vector<float>& in, Index count,
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
        if (ids[i] == expert) places.push_back(i);
      const Index count = static_cast<Index>(places.size());
      if (count == 0) continue;
      inputs.resize(static_cast<size_t>(count * k));
      for (size_t i = 0; i < places.size(); ++i)
        std::copy_n(x.row(places[i] / chosen), k, &inputs[i * static_cast<size_t>(k)]);
      expert_product(gate, expert, inputs, count, a);
      expert_product(up, expert, inputs, count, b);
      for_rows(count, inner, [&](Index first, Index end) {
        gating(&a[static_cast<size_t>(first * inner)], &b[static_cast<size_t>(first * inner)],
               &a[static_cast<size_t>(first * inner)], (end - first) * inner);
      });
      expert_product(down, expert, a, count, out);
      for (size_t i = 0; i < places.size(); ++i)
        std::copy_n(&out[i * static_cast<size_t>(n)], n, &parts[static_cast<size_t>(places[i] * n)]);
    }
    for_rows(rows, chosen * n, [&](Index first, Index end) {
      for (Index r = first; r < end; ++r)
        kernels().weighted_sum(&parts[static_cast<size_t>(r * chosen * n)], weights + r * chosen, chosen, y + r * n, n);
    });
  }
};

void py_experts(Any x, Ints ids, In weights, const Matrix& gate, const Matrix& up, const Matrix& down, bool situ,
                float beta, float linear_beta, Out y) {
  const Experts experts{gate, up, down, {situ, beta, linear_beta}};
  experts(rows_apart(x), ids.data(), weights.data(), dim(weights, 1), y.data());
}

void py_mixture(Any x, const Matrix& router, std::optional<In> router_bias, std::optional<In> score_bias, Index top_k,
                float scale, bool normalise, const Matrix& gate, const Matrix& up, const Matrix& down,
                const Matrix* latent_down, std::optional<In> latent_down_bias, std::optional<In> latent_norm,
                float latent_eps, const Matrix* latent_up, std::optional<In> latent_up_bias,
                const Matrix* shared_gate_up, std::optional<In> shared_gate_up_bias, const Matrix* shared_down,
                std::optional<In> shared_down_bias, bool situ, float beta, float linear_beta, std::optional<In> norm,
                float eps, std::optional<In> residual, Out y) {
  static thread_local std::vector<float> copies, logits, weights, inner, said, normed, routed;
  static thread_local std::vector<int64_t> ids;
  const Strided apart = rows_apart(x);
  const Index rows = apart.rows, width = gate.columns;
  const Strided dense{dense_rows(apart, data_of(norm), eps, copies), rows, apart.width, apart.width};
  const auto room = [&](auto& numbers, Index count) { numbers.resize(static_cast<size_t>(rows * count)); };
  const Routing routing{data_of(score_bias), top_k, scale, normalise};
  const Gating gating{situ, beta, linear_beta};
  room(logits, router.rows);
  room(ids, top_k);
  room(weights, top_k);
  room(said, width);
  product(router, dense.data, rows, data_of(router_bias), nullptr, logits.data());
  routing(logits.data(), rows, router.rows, ids.data(), weights.data());
  Strided seen = dense;
  if (latent_down != nullptr) {
    room(inner, width);
    product(*latent_down, dense.data, rows, data_of(latent_down_bias), nullptr, inner.data());
    seen = {inner.data(), rows, width, width};
  }
  Experts{gate, up, down, gating}(seen, ids.data(), weights.data(), top_k, said.data());
  const float* added = data_of(residual);
  room(routed, apart.width);
  float* sum = shared_down != nullptr ? routed.data() : y.data();
  if (latent_up != nullptr) {
    const float* out = dense_rows({said.data(), rows, width, width}, data_of(latent_norm), latent_eps, normed);
    product(*latent_up, out, rows, data_of(latent_up_bias), added, sum);
  } else {
    const float* out = said.data();
    for (Index i = 0; i < rows * width; ++i) sum[i] = added ? added[i] + out[i] : out[i];
  }
  if (shared_down != nullptr)
    mlp({*shared_gate_up, data_of(shared_gate_up_bias), *shared_down, data_of(shared_down_bias), gating}, dense.data,
        rows, sum, y.data());
}

}  // namespace

void bind_experts(nb::module_& m) {
  m.def("route", &py_route, nb::arg("logits"), nb::arg("bias").none(), nb::arg("scale"), nb::arg("normalise"),
        nb::arg("ids"), nb::arg("weights"), NoLock());
  m.def("experts", &py_experts, NoLock());
  const auto none = [](const char* name) { return nb::arg(name).none(); };
  m.def("mixture", &py_mixture, nb::arg("x"), nb::arg("router"), none("router_bias"), none("score_bias"),
        nb::arg("top_k"), nb::arg("scale"), nb::arg("normalise"), nb::arg("gate"), nb::arg("up"), nb::arg("down"),
        none("latent_down"), none("latent_down_bias"), none("latent_norm"), nb::arg("latent_eps"), none("latent_up"),
        none("latent_up_bias"), none("shared_gate_up"), none("shared_gate_up_bias"), none("shared_down"),
        none("shared_down_bias"), nb::arg("situ"), nb::arg("beta"), nb::arg("linear_beta"), none("norm"),
        nb::arg("eps"), none("residual"), nb::arg("y"), NoLock());
}

}  // namespace redraft
