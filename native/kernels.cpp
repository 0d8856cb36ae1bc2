#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "lanes.h"

namespace redraft::ISA {
namespace {

float sum_of_squares(const float* x, Index dim) {
  V16 acc = zero();
  for (Index i = 0; i < dim; i += 16) {
    const V16 v = load_some(x + i, std::min<Index>(16, dim - i));
    acc = fma(v, v, acc);
  }
  return sum(acc);
}

float dot(const float* a, const float* b, Index dim) {
  V16 acc = zero();
  for (Index i = 0; i < dim; i += 16) {
    const Index n = std::min<Index>(16, dim - i);
    acc = fma(load_some(a + i, n), load_some(b + i, n), acc);
  }
  return sum(acc);
}

void rms_norm(const float* x, const float* weight, float eps, float* y, Index rows, Index dim) {
  for (Index r = 0; r < rows; ++r, x += dim, y += dim) {
    const V16 factor = set1(1.0f / std::sqrt(sum_of_squares(x, dim) / static_cast<float>(dim) + eps));
    map(dim, y, [&](Index i, Index n) { return mul(load_some(weight + i, n), mul(load_some(x + i, n), factor)); });
  }
}

void l2_norm(const float* x, float eps, float scale, float* y, Index rows, Index dim) {
  for (Index r = 0; r < rows; ++r, x += dim, y += dim) {
    const V16 factor = set1(1.0f / std::sqrt(sum_of_squares(x, dim) + eps));
    map(dim, y, [&](Index i, Index n) { return mul(mul(load_some(x + i, n), factor), set1(scale)); });
  }
}

void sigmoid_of(const float* x, float* y, Index count) {
  map(count, y, [&](Index i, Index n) { return sigmoid(load_some(x + i, n)); });
}

void sigmoid_gate(const float* x, const float* gate, float* y, Index count) {
  map(count, y, [&](Index i, Index n) { return mul(load_some(x + i, n), sigmoid(load_some(gate + i, n))); });
}

void swiglu(const float* a, const float* b, float* y, Index count) {
  map(count, y, [&](Index i, Index n) {
    const V16 gate = load_some(a + i, n);
    return mul(mul(gate, sigmoid(gate)), load_some(b + i, n));
  });
}

void situ(const float* a, const float* b, float beta, float linear_beta, float* y, Index count) {
  map(count, y, [&](Index i, Index n) {
    const V16 gate = load_some(a + i, n), capped = mul(set1(beta), tanh(div(gate, set1(beta))));
    V16 up = load_some(b + i, n);
    if (linear_beta > 0) up = mul(set1(linear_beta), tanh(div(up, set1(linear_beta))));
    return mul(mul(capped, sigmoid(gate)), up);
  });
}

void decay(const float* f, const float* neg_exp_a, const float* bound, float* y, Index rows, Index heads, Index dim) {
  for (Index r = 0; r < rows * heads; ++r, f += dim, y += dim) {
    const float a = neg_exp_a[r % heads];
    if (bound != nullptr) {
      map(dim, y, [&](Index i, Index n) {
        return exp(mul(set1(*bound), sigmoid(mul(set1(-a), load_some(f + i, n)))));
      });
      continue;
    }
    alignas(64) float softplus[kMaxKeyDim];
    for (Index i = 0; i < dim; ++i) softplus[i] = std::max(f[i], 0.0f) + std::log1p(std::exp(-std::fabs(f[i])));
    map(dim, y, [&](Index i, Index n) { return exp(mul(set1(a), load_some(softplus + i, n))); });
  }
}

void rope(const float* x, const float* cos, const float* sin, float* y, Index heads, Index dim, Index half) {
  for (Index h = 0; h < heads; ++h, x += dim, y += dim) {
    for (Index i = 0; i < half; ++i) {
      y[i] = x[i] * cos[i] - x[half + i] * sin[i];
      y[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
    }
    std::copy(x + 2 * half, x + dim, y + 2 * half);
  }
}

// Channels [first, end) of one window; taps [W][C].
void short_conv(const float* x, Index step, const float* taps, const float* history, float* y, Index rows, Index channels,
                Index width, Index first, Index end) {
  for (Index t = 0; t < rows; ++t) {
    map(end - first, y + t * channels + first, [&](Index i, Index n) {
      V16 total = zero();
      for (Index tap = 0; tap < width; ++tap) {
        const Index from = t + tap - (width - 1);  // before the window where negative
        const float* input = from < 0 ? history + (from + width - 1) * channels : x + from * step;
        total = fma(load_some(input + first + i, n), load_some(taps + tap * channels + first + i, n), total);
      }
      return mul(total, sigmoid(total));
    });
  }
}

void dot_rows(const float* w, const float* x, float* y, Index rows, Index columns) {
  for (Index r = 0; r < rows; ++r) y[r] = dot(w + r * columns, x, columns);
}

void weighted_sum(const float* parts, const float* weights, Index count, float* y, Index dim) {
  map(dim, y, [&](Index i, Index n) {
    V16 total = zero();
    for (Index j = 0; j < count; ++j) total = fma(set1(weights[j]), load_some(parts + j * dim + i, n), total);
    return total;
  });
}

// One row: Σ p_j stream_j with p = softmax over j of Σ rms_norm(stream_j) · weight.
void mix_streams(const float* const* streams, Index count, const float* weight, float eps, float* y, Index dim) {
  alignas(64) float share[kMaxStreams];
  float highest = -std::numeric_limits<float>::infinity(), total = 0.0f;
  for (Index j = 0; j < count; ++j) {
    const float size = std::sqrt(sum_of_squares(streams[j], dim) / static_cast<float>(dim) + eps);
    share[j] = dot(streams[j], weight, dim) / size;
    highest = std::max(highest, share[j]);
  }
  for (Index j = 0; j < count; ++j) {
    alignas(64) float lane[16];
    store(lane, exp(set1(share[j] - highest)));
    share[j] = lane[0];
    total += share[j];
  }
  for (Index j = 0; j < count; ++j) share[j] /= total;
  map(dim, y, [&](Index i, Index n) {
    V16 sum_of_streams = zero();
    for (Index j = 0; j < count; ++j) sum_of_streams = fma(set1(share[j]), load_some(streams[j] + i, n), sum_of_streams);
    return sum_of_streams;
  });
}

// The largest of 64·n numbers: a streaming read, for benchmarks.
float read_all(const float* data, Index count) {
  V16 best[4] = {zero(), zero(), zero(), zero()};
  for (Index i = 0; i + 64 <= count; i += 64)
    for (Index j = 0; j < 4; ++j) best[j] = max(best[j], load(data + i + 16 * j));
  return max_of(max(max(best[0], best[1]), max(best[2], best[3])));
}

}  // namespace

const Kernels kTable = {rms_norm,   l2_norm,  sigmoid_of, sigmoid_gate, swiglu,      situ,     decay,       rope,
                        short_conv, dot_rows, scan,       attention,    mix_streams, read_all, weighted_sum};

}  // namespace redraft::ISA
