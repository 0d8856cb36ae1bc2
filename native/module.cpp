// The Python module: matrices, threads, and what the other files bind.
#include <atomic>

#include "arrays.h"
#include "cpu.h"

using namespace redraft;

namespace {

void py_embed(const Matrix& w, Ints tokens, Out y) {
  for (Index i = 0; i < dim(tokens, 0); ++i) unpack_row(w, tokens.data()[i], y.data() + i * w.columns);
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
  m.def("embed", &py_embed, NoLock());
  bind_rows(m);
  bind_experts(m);
  bind_state(m);
  bind_attention(m);
  bind_sampling(m);
  m.def("read_all", &py_read_all, NoLock());
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads);
  m.def("isa", [] { return isa_name(isa()); });
  m.def("best_isa", [] { return isa_name(best_isa()); });
  m.def("use_isa", &use_isa);
}
