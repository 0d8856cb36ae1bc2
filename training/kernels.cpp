// What PyTorch has no fast operation for on a CPU, forward and backward.
//
// The delta rule with a decay per key channel, token by token in float32. One head: A = diag(e^g) S;  u = β (v − Aᵀk);  S = A + k uᵀ;  o = Sᵀq.   S: D × D, rows are key channels.
// Arrays are [batch, time, head, D], β is [batch, time, head]. Each (batch, head) is independent; threads share them out.
//
// SiTU: y = w · β tanh(a/β) σ(a) · γ tanh(b/γ), β = 4, γ = 25, with a weight per row; rows are [a, b], float32 or bf16.
//
// Causal convolution of each channel over its last four inputs, then SiLU. x [batch, time, channels] is float32 or bf16.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int kChunk = 32;  // states are kept at chunk starts and recomputed within a chunk on the way back

struct Shape {
  long batch, time, heads, threads;
};

struct Strides {  // of one head's sequence: where token t's vector starts
  long first, step;
  long operator()(long t) const { return first + t * step; }
};

template <typename Work>
void over_heads(const Shape& s, const Work& work) {
  std::atomic<long> next{0};
  auto worker = [&] {
    for (long unit; (unit = next.fetch_add(1)) < s.batch * s.heads;) work(unit);
  };
  std::vector<std::thread> others;
  for (long i = 1; i < s.threads; ++i) others.emplace_back(worker);
  worker();
  for (auto& thread : others) thread.join();
}

long chunks(long time) { return (time + kChunk - 1) / kChunk; }

template <int D>
void forward_head(const Shape& s, long unit, const float* q, const float* k, const float* v, const float* g,
                  const float* beta, float* o, float* u, float* starts) {
  const long b = unit / s.heads, h = unit % s.heads;
  const Strides at{(b * s.time * s.heads + h) * D, s.heads * D};
  alignas(64) float state[D][D] = {};
  alignas(64) float added[D] = {}, recalled[D], read[D], decay[D];
  const float* last_k = k + at(0);  // times a zero u before the first token
  for (long t = 0; t < s.time; ++t) {
    const float *qt = q + at(t), *kt = k + at(t), *vt = v + at(t), *gt = g + at(t);
    for (int i = 0; i < D; ++i) decay[i] = std::exp(gt[i]);
    std::memset(recalled, 0, sizeof recalled);
    std::memset(read, 0, sizeof read);
    if (t % kChunk == 0) {  // the state before this token, whole
      for (int i = 0; i < D; ++i)
        for (int j = 0; j < D; ++j) state[i][j] += last_k[i] * added[j];
      std::memset(added, 0, sizeof added);
      std::memcpy(starts + (unit * chunks(s.time) + t / kChunk) * D * D, state, sizeof state);
    }
    float kq = 0;
    for (int i = 0; i < D; ++i) {
      const float last = last_k[i], a = decay[i], ki = kt[i], qi = qt[i];
      for (int j = 0; j < D; ++j) {
        const float x = (state[i][j] + last * added[j]) * a;
        state[i][j] = x;
        recalled[j] += ki * x;
        read[j] += qi * x;
      }
      kq += ki * qi;
    }
    const float bt = beta[(b * s.time + t) * s.heads + h];
    float *ut = u + at(t), *ot = o + at(t);
    for (int j = 0; j < D; ++j) {
      added[j] = bt * (vt[j] - recalled[j]);
      ut[j] = added[j];
      ot[j] = read[j] + kq * added[j];
    }
    last_k = kt;
  }
}

// Everything transposed (row j is value channel j), so that sums over value channels run down the rows.
template <int D>
void backward_head(const Shape& s, long unit, const float* q, const float* k, const float* g, const float* beta,
                   const float* u, const float* starts, const float* d_o, float* dq, float* dk,
                   float* dv, float* dg, float* dbeta) {
  const long b = unit / s.heads, h = unit % s.heads;
  const Strides at{(b * s.time * s.heads + h) * D, s.heads * D};
  alignas(64) float dstate[D][D] = {};
  std::vector<float> kept(static_cast<size_t>(kChunk) * D * D + 16);
  float* decayed = kept.data() + (64 - reinterpret_cast<size_t>(kept.data()) % 64) % 64 / 4;  // A of each token
  alignas(64) float decay[kChunk][D], du[D], dr[D], sum_k[D], sum_q[D], sum_g[D];
  for (long c = chunks(s.time) - 1; c >= 0; --c) {
    const long first = c * kChunk, end = std::min(s.time, first + kChunk);
    const float* start = starts + (unit * chunks(s.time) + c) * D * D;
    for (long t = first; t < end; ++t) {
      float *a = decay[t - first], *now = decayed + (t - first) * D * D;
      for (int i = 0; i < D; ++i) a[i] = std::exp(g[at(t) + i]);
      if (t == first) {
        for (int j = 0; j < D; ++j)
          for (int i = 0; i < D; ++i) now[j * D + i] = start[i * D + j] * a[i];
        continue;
      }
      const float *before = now - D * D, *k_before = k + at(t - 1), *u_before = u + at(t - 1);
      for (int j = 0; j < D; ++j)
        for (int i = 0; i < D; ++i) now[j * D + i] = (before[j * D + i] + u_before[j] * k_before[i]) * a[i];
    }
    for (long t = end - 1; t >= first; --t) {
      const float *qt = q + at(t), *kt = k + at(t), *ut = u + at(t), *dot = d_o + at(t);
      const float *a = decay[t - first], *now = decayed + (t - first) * D * D;
      const long scalar = (b * s.time + t) * s.heads + h;
      std::memset(sum_k, 0, sizeof sum_k);
      std::memset(sum_q, 0, sizeof sum_q);
      std::memset(sum_g, 0, sizeof sum_g);
      const float bt = beta[scalar];
      float u_do = 0, db = 0;
      for (int j = 0; j < D; ++j) {
        const float d = dot[j], uj = ut[j];
        float sum = 0;
        for (int i = 0; i < D; ++i) {
          const float x = dstate[j][i] + d * qt[i];
          dstate[j][i] = x;
          sum += x * kt[i];
          sum_k[i] += x * uj;
        }
        du[j] = sum;
        u_do += uj * d;
      }
      for (int j = 0; j < D; ++j) {
        dr[j] = -bt * du[j];
        dv[at(t) + j] = bt * du[j];
        db += bt != 0 ? du[j] * ut[j] / bt : 0;  // u / β = v − Aᵀk
      }
      for (int j = 0; j < D; ++j) {
        const float r = dr[j], d = dot[j];
        for (int i = 0; i < D; ++i) {
          const float x = dstate[j][i] + r * kt[i], y = now[j * D + i];
          sum_k[i] += y * r;
          sum_q[i] += y * d;
          sum_g[i] += x * y;
          dstate[j][i] = x * a[i];
        }
      }
      dbeta[scalar] = db;
      for (int i = 0; i < D; ++i) {
        dk[at(t) + i] = sum_k[i];
        dq[at(t) + i] = sum_q[i] + kt[i] * u_do;
        dg[at(t) + i] = sum_g[i];
      }
    }
  }
}

template <int D>
void forward(const Shape& s, const float* q, const float* k, const float* v, const float* g, const float* beta,
             float* o, float* u, float* starts) {
  over_heads(s, [&](long unit) { forward_head<D>(s, unit, q, k, v, g, beta, o, u, starts); });
}

template <int D>
void backward(const Shape& s, const float* q, const float* k, const float* g, const float* beta, const float* u,
              const float* starts, const float* d_o, float* dq, float* dk, float* dv, float* dg,
              float* dbeta) {
  over_heads(s, [&](long unit) {
    backward_head<D>(s, unit, q, k, g, beta, u, starts, d_o, dq, dk, dv, dg, dbeta);
  });
}

struct Bfloat {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  static Bfloat of(float value) {  // to nearest, ties to even
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    return {static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16)};
  }
};
inline void store(float& to, float value) { to = value; }
inline void store(Bfloat& to, float value) { to = Bfloat::of(value); }

template <typename Work>
void over_rows(long rows, long threads, const Work& work) {
  over_heads({threads, 0, 1, threads}, [&](long part) {
    for (long r = rows * part / threads; r < rows * (part + 1) / threads; ++r) work(r);
  });
}

struct Squashed {  // c · tanh(x / c), and its slope
  float value, slope;
};
inline Squashed squash(float x, float c) {
  const float t = 1 - 2 / (1 + std::exp(2 / c * x));
  return {c * t, 1 - t * t};
}

template <typename T>
void situ_rows(long rows, long inner, long threads, const T* in, const float* weight, T* out) {
  over_rows(rows, threads, [&](long r) {
    const T *a = in + 2 * r * inner, *b = a + inner;
    T* y = out + r * inner;
    const float w = weight[r];
    for (long i = 0; i < inner; ++i) {
      const float gate = squash(a[i], 4).value / (1 + std::exp(-static_cast<float>(a[i])));
      store(y[i], w * gate * squash(b[i], 25).value);
    }
  });
}

template <typename T>
void situ_rows_backward(long rows, long inner, long threads, const T* in, const float* weight, const T* d_out, T* d_in,
                        float* d_weight) {
  over_rows(rows, threads, [&](long r) {
    const T *a = in + 2 * r * inner, *b = a + inner, *dy = d_out + r * inner;
    T *da = d_in + 2 * r * inner, *db = da + inner;
    const float w = weight[r];
    float sum = 0;
    for (long i = 0; i < inner; ++i) {
      const float sigmoid = 1 / (1 + std::exp(-static_cast<float>(a[i])));
      const Squashed left = squash(a[i], 4), right = squash(b[i], 25);
      const float gate = left.value * sigmoid, d = dy[i];
      sum += d * gate * right.value;
      store(da[i], d * w * right.value * (left.slope * sigmoid + gate * (1 - sigmoid)));
      store(db[i], d * w * gate * right.slope);
    }
    d_weight[r] = sum;
  });
}

constexpr int kTaps = 4;
constexpr long kChannels = 64;  // a thread's piece

inline float silu_slope(float x) {
  const float sigmoid = 1 / (1 + std::exp(-x));
  return sigmoid * (1 + x * (1 - sigmoid));
}

// One piece of channels of one sequence; before the first token all inputs are zero.
template <typename T, typename Visit>
void convolve(const Shape& s, long unit, const T* x, const float* taps, const Visit& visit) {
  const long channels = s.heads * kChannels, b = unit / s.heads, top = unit % s.heads * kChannels;
  alignas(64) float window[kTaps][kChannels] = {}, w[kTaps][kChannels], sum[kChannels];
  for (int i = 0; i < kTaps; ++i)
    for (long c = 0; c < kChannels; ++c) w[i][c] = taps[(top + c) * kTaps + i];
  for (long t = 0; t < s.time; ++t) {
    const long at = (b * s.time + t) * channels + top;
    std::memmove(window, window + 1, sizeof window - sizeof window[0]);
    for (long c = 0; c < kChannels; ++c) window[kTaps - 1][c] = x[at + c];
    for (long c = 0; c < kChannels; ++c)
      sum[c] = w[0][c] * window[0][c] + w[1][c] * window[1][c] + w[2][c] * window[2][c] + w[3][c] * window[3][c];
    visit(t, at, window, sum);
  }
}

template <typename T>
void conv_forward(const Shape& s, const T* x, const float* taps, float* y) {
  over_heads(s, [&](long unit) {
    convolve(s, unit, x, taps, [&](long, long at, const auto&, const float* sum) {
      for (long c = 0; c < kChannels; ++c) y[at + c] = sum[c] / (1 + std::exp(-sum[c]));
    });
  });
}

// d_taps is [batch, channels, 4], to be summed over the batch.
template <typename T>
void conv_backward(const Shape& s, const T* x, const float* taps, const float* d_y, T* d_x, float* d_taps) {
  const long channels = s.heads * kChannels;
  over_heads(s, [&](long unit) {
    const long b = unit / s.heads, top = unit % s.heads * kChannels;
    alignas(64) float d_w[kTaps][kChannels] = {};
    std::vector<float> d_sums(static_cast<size_t>((s.time + kTaps - 1) * kChannels));  // zero after the last token
    convolve(s, unit, x, taps, [&](long t, long at, const auto& window, const float* sum) {
      float* d_sum = d_sums.data() + t * kChannels;
      for (long c = 0; c < kChannels; ++c) d_sum[c] = d_y[at + c] * silu_slope(sum[c]);
      for (int i = 0; i < kTaps; ++i)
        for (long c = 0; c < kChannels; ++c) d_w[i][c] += d_sum[c] * window[i][c];
    });
    for (long t = 0; t < s.time; ++t) {
      alignas(64) float total[kChannels] = {};
      for (int i = 0; i < kTaps; ++i)
        for (long c = 0; c < kChannels; ++c)
          total[c] += taps[(top + c) * kTaps + i] * d_sums[static_cast<size_t>((t + kTaps - 1 - i) * kChannels + c)];
      for (long c = 0; c < kChannels; ++c) store(d_x[(b * s.time + t) * channels + top + c], total[c]);
    }
    for (int i = 0; i < kTaps; ++i)
      for (long c = 0; c < kChannels; ++c) d_taps[(b * channels + top + c) * kTaps + i] = d_w[i][c];
  });
}

}  // namespace

extern "C" {

int chunk_tokens() { return kChunk; }

// Returns 0, or 1 for a head width that was not compiled.
int delta_forward(long batch, long time, long heads, long width, long threads, const float* q, const float* k,
                  const float* v, const float* g, const float* beta, float* o, float* u, float* starts) {
  const Shape s{batch, time, heads, threads};
  if (width == 64) return forward<64>(s, q, k, v, g, beta, o, u, starts), 0;
  if (width == 32) return forward<32>(s, q, k, v, g, beta, o, u, starts), 0;
  return 1;
}

int delta_backward(long batch, long time, long heads, long width, long threads, const float* q, const float* k,
                   const float* g, const float* beta, const float* u, const float* starts,
                   const float* d_o, float* dq, float* dk, float* dv, float* dg, float* dbeta) {
  const Shape s{batch, time, heads, threads};
  if (width == 64) return backward<64>(s, q, k, g, beta, u, starts, d_o, dq, dk, dv, dg, dbeta), 0;
  if (width == 32) return backward<32>(s, q, k, g, beta, u, starts, d_o, dq, dk, dv, dg, dbeta), 0;
  return 1;
}

void situ_float(long rows, long inner, long threads, const float* in, const float* weight, float* out) {
  situ_rows(rows, inner, threads, in, weight, out);
}

void situ_bfloat(long rows, long inner, long threads, const void* in, const float* weight, void* out) {
  situ_rows(rows, inner, threads, static_cast<const Bfloat*>(in), weight, static_cast<Bfloat*>(out));
}

void situ_float_backward(long rows, long inner, long threads, const float* in, const float* weight, const float* d_out,
                         float* d_in, float* d_weight) {
  situ_rows_backward(rows, inner, threads, in, weight, d_out, d_in, d_weight);
}

void situ_bfloat_backward(long rows, long inner, long threads, const void* in, const float* weight, const void* d_out,
                          void* d_in, float* d_weight) {
  situ_rows_backward(rows, inner, threads, static_cast<const Bfloat*>(in), weight, static_cast<const Bfloat*>(d_out),
                     static_cast<Bfloat*>(d_in), d_weight);
}

// Channels are a multiple of 64; `pieces` is channels / 64.
void conv_float(long batch, long time, long pieces, long threads, const float* x, const float* taps, float* y) {
  conv_forward(Shape{batch, time, pieces, threads}, x, taps, y);
}

void conv_bfloat(long batch, long time, long pieces, long threads, const void* x, const float* taps, float* y) {
  conv_forward(Shape{batch, time, pieces, threads}, static_cast<const Bfloat*>(x), taps, y);
}

void conv_float_backward(long batch, long time, long pieces, long threads, const float* x, const float* taps,
                         const float* d_y, float* d_x, float* d_taps) {
  conv_backward(Shape{batch, time, pieces, threads}, x, taps, d_y, d_x, d_taps);
}

void conv_bfloat_backward(long batch, long time, long pieces, long threads, const void* x, const float* taps,
                          const float* d_y, void* d_x, float* d_taps) {
  conv_backward(Shape{batch, time, pieces, threads}, static_cast<const Bfloat*>(x), taps, d_y, static_cast<Bfloat*>(d_x),
                d_taps);
}

}  // extern "C"
