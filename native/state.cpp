// Operations on what a window inherits: the convolution and the delta-rule scan.
#include "arrays.h"

namespace redraft {
namespace {

// history [N, W − 1, C], taps [W, C].
void short_conv(const Strided& x, const float* taps, Index width, const float* history, const int64_t* starts,
                Index windows, float* y) {
  const auto run = [&](Index first, Index end) {
    for (Index w = 0; w < windows; ++w) {
      const Index row = starts[w], rows = starts[w + 1] - row;
      kernels().short_conv(x.row(row), x.step, taps, history + w * (width - 1) * x.width, y + row * x.width, rows,
                           x.width, width, first, end);
    }
  };
  if (x.rows * x.width * width < kWorthThreads) {
    run(0, x.width);
  } else {
    parallel_for(x.width, 16, run);
  }
}

void py_short_conv(Any x, In taps, In history, Ints starts, Out y) {
  short_conv(rows_apart(x), taps.data(), dim(taps, 0), history.data(), starts.data(), dim(starts, 0) - 1, y.data());
}

void py_short_conv_ring(Any rows, In taps, Ints slots, Ints starts, Out ring, std::optional<Out> tail, Ints cursor,
                        Ints num_before, Flags advance, Out y) {
  static thread_local std::vector<float> history;
  const Strided x = rows_apart(rows);
  const Index windows = dim(slots, 0), keep = dim(taps, 0) - 1, places = dim(ring, 1), channels = x.width;
  history.resize(static_cast<size_t>(windows * keep * channels));
  const auto column = [&](Index w, Index place) {
    return ring.data() + (slots.data()[w] * places + (cursor.data()[w] + place) % places) * channels;
  };
  for (Index w = 0; w < windows; ++w)
    for (Index i = 0; i < keep; ++i)
      std::copy_n(column(w, num_before.data()[w] + i), channels, &history[static_cast<size_t>((w * keep + i) * channels)]);
  short_conv(x, taps.data(), keep + 1, history.data(), starts.data(), windows, y.data());
  for (Index w = 0; w < windows; ++w) {
    const Index first = starts.data()[w], count = starts.data()[w + 1] - first, before = num_before.data()[w];
    if (advance.data()[w]) {
      for (Index i = 0; i < keep; ++i) {
        const Index from = count - keep + i;  // before the window where negative
        const float* last =
            from < 0 ? &history[static_cast<size_t>((w * keep + keep + from) * channels)] : x.row(first + from);
        std::copy_n(last, channels, column(w, i));
      }
      continue;
    }
    for (Index t = 0; t < count; ++t) {
      const bool fits = keep + before + t < places;
      if (!fits && !tail) throw std::invalid_argument("a window outgrows its ring");
      std::copy_n(x.row(first + t), channels,
                  fits ? column(w, keep + before + t) : tail->data() + slots.data()[w] * channels);
    }
  }
}

struct ScanPlan {
  Scan call;
  std::vector<ScanWindow> windows;
};

// All pieces of a scan: windows × heads × blocks of value columns.
void run_scan(const ScanPlan& plan) {
  const ScanShape& shape = plan.call.shape;
  const Index blocks = (shape.value_dim + kScanColumns - 1) / kScanColumns, per_window = shape.value_heads * blocks;
  const Index pieces = static_cast<Index>(plan.windows.size()) * per_window;
  parallel_for(pieces, 1, [&](Index first, Index end) {
    for (Index piece = first; piece < end; ++piece) {
      const Index rest = piece % per_window;
      kernels().scan(plan.call, plan.windows[static_cast<size_t>(piece / per_window)], rest / blocks,
                     rest % blocks * kScanColumns);
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

}  // namespace

void bind_state(nb::module_& m) {
  m.def("short_conv", &py_short_conv, NoLock());
  m.def("short_conv_ring", &py_short_conv_ring, nb::arg("x"), nb::arg("taps"), nb::arg("slots"), nb::arg("starts"),
        nb::arg("ring"), nb::arg("tail").none(), nb::arg("cursor"), nb::arg("num_before"), nb::arg("advance"),
        nb::arg("y"), NoLock());
  m.def("delta_scan", &py_delta_scan, NoLock());
  m.def("delta_scan_planes", &py_delta_scan_planes, NoLock());
}

}  // namespace redraft
