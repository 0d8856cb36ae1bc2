// Everything but matrix products: serial pieces of work, compiled for each instruction set. `ops.cpp` cuts an
// operation into pieces and runs them on all threads. The specification is redraft/ops/reference.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace redraft {

using Index = std::ptrdiff_t;

struct ScanShape {
  Index heads, value_heads, key_dim, value_dim, decay_dim;
};

// One call of the delta-rule scan; arrays as the reference names them.
struct Scan {
  ScanShape shape;
  const float *q, *k, *v, *decay, *beta;  // by row
  float* out;                             // [B, HV, V]
  float* state;                           // [S, HV, K, V], or planes [S, P, HV, K, V]
  const float *record_decay, *record_k;   // [S, R, …]
  float* record_u;
  Index num_records;
  Index num_planes;                       // 0: no planes
};

// One window of it.
struct ScanWindow {
  Index slot, first, end;
  Index num_folded, num_replayed;
  bool advance;
  Index plane, last;  // with planes: where to start, and the committed plane
};

struct AttentionShape {
  Index heads, groups, key_dim, value_dim;
  Index key_step, value_step;    // numbers from one position to the next
  float scale;
  bool half;                     // keys and values are bf16
};

// One head of one row, over the first `length` positions.
struct AttentionQuery {
  const float* q;
  float* out;
  Index length;
};

constexpr Index kScanColumns = 32;                   // of a state's values, scanned by one thread at a time
constexpr Index kMaxStreams = 64;                    // that one mixture may have
constexpr Index kAttentionPositions = 64;            // taken together, in order
constexpr Index kAttentionQueries = 64;              // that may share a look at the keys, in order of length
constexpr Index kMaxKeyDim = 640, kMaxValueDim = 640;  // of a head

struct Kernels {
  void (*rms_norm)(const float* x, const float* weight, float eps, float* y, Index rows, Index dim);
  void (*l2_norm)(const float* x, float eps, float scale, float* y, Index rows, Index dim);
  void (*sigmoid)(const float* x, float* y, Index count);
  void (*sigmoid_gate)(const float* x, const float* gate, float* y, Index count);
  void (*swiglu)(const float* a, const float* b, float* y, Index count);
  void (*situ)(const float* a, const float* b, float beta, float linear_beta, float* y, Index count);
  void (*decay)(const float* f, const float* neg_exp_a, const float* bound, float* y, Index rows, Index heads,
                Index dim);
  void (*rope)(const float* x, const float* cos, const float* sin, float* y, Index heads, Index dim, Index half);
  void (*short_conv)(const float* x, Index step, const float* taps, const float* history, float* y, Index rows,
                     Index channels, Index width, Index first, Index end);
  void (*dot_rows)(const float* w, const float* x, float* y, Index rows, Index columns);
  void (*scan)(const Scan& call, const ScanWindow& window, Index head, Index column);
  void (*attention)(const AttentionShape& shape, const AttentionQuery* queries, Index num_queries, const void* keys,
                    const void* values);
  void (*mix_streams)(const float* const* streams, Index count, const float* weight, float eps, float* y, Index dim);
  float (*read_all)(const float* data, Index count);
  void (*weighted_sum)(const float* parts, const float* weights, Index count, float* y, Index dim);
};

const Kernels& kernels();

namespace avx2 {
extern const Kernels kTable;
}
namespace avx512 {
extern const Kernels kTable;
}

}  // namespace redraft
