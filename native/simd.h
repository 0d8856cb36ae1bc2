// Sixteen lanes of float32 or int32: one register of AVX-512, two of AVX2. Kernels are written once in these.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace redraft::ISA {

#ifdef __AVX512F__

struct V16 {
  __m512 v;
};

inline V16 zero() { return {_mm512_setzero_ps()}; }
inline V16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline V16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, V16 a) { _mm512_storeu_ps(p, a.v); }
inline V16 add(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V16 sub(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V16 mul(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V16 div(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline V16 max(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V16 min(V16 a, V16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline V16 fma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// a < b ? x : y, lane by lane.
inline V16 where_less(V16 a, V16 b, V16 x, V16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
inline V16 round(V16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^n for whole n within the exponent's range.
inline V16 exp2_whole(V16 n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
// Sixteen pairs of bf16: the first and the second number of each.
inline V16 bf16_even(const uint8_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
inline V16 bf16_odd(const uint8_t* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
}
inline V16 load_bf16(const uint16_t* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline V16 load_half(const uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}

// The first `count` lanes, and `rest` in the others.
inline V16 first_lanes(V16 a, int64_t count, float rest) {
  if (count >= 16) return a;
  return {_mm512_mask_blend_ps(static_cast<__mmask16>((1u << count) - 1), _mm512_set1_ps(rest), a.v)};
}

struct I16 {
  __m512i v;
};
inline I16 iset1(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline V16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline int32_t four_bytes(const int8_t* x) {
  int32_t packed;
  std::memcpy(&packed, x, 4);
  return packed;
}
inline __m512i add4(const __m512i* acc) {
  return _mm512_add_epi32(_mm512_add_epi32(acc[0], acc[1]), _mm512_add_epi32(acc[2], acc[3]));
}
// Σ of products over a group of 32, exactly, so that four sums side by side are as good as one. First weights 0 … 15,
// which come with `offset` for each lane, then signed ones, shifted by 128 to be unsigned.
inline I16 dot_nibbles(const uint8_t* w, const int8_t* x, int32_t offset) {
  const __m512i mask = _mm512_set1_epi8(15);
  __m512i acc[4] = {_mm512_set1_epi32(offset), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
  for (int r = 0; r < 4; ++r) {
    const __m512i q = _mm512_loadu_si512(w + 64 * r);
    acc[r] = _mm512_dpbusd_epi32(acc[r], _mm512_and_si512(q, mask), _mm512_set1_epi32(four_bytes(x + 4 * r)));
    const __m512i upper = _mm512_and_si512(_mm512_srli_epi16(q, 4), mask);
    acc[r] = _mm512_dpbusd_epi32(acc[r], upper, _mm512_set1_epi32(four_bytes(x + 16 + 4 * r)));
  }
  return {add4(acc)};
}
inline I16 dot_group(const uint8_t* w, const int8_t* x, int32_t sum_of_x) {
  __m512i acc[4] = {_mm512_set1_epi32(-128 * sum_of_x), _mm512_setzero_si512(), _mm512_setzero_si512(),
                    _mm512_setzero_si512()};
  for (int r = 0; r < 8; ++r) {
    const __m512i shifted = _mm512_xor_si512(_mm512_loadu_si512(w + 64 * r), _mm512_set1_epi8(-128));
    acc[r % 4] = _mm512_dpbusd_epi32(acc[r % 4], shifted, _mm512_set1_epi32(four_bytes(x + 4 * r)));
  }
  return {add4(acc)};
}

#else

struct V16 {
  __m256 a, b;
};

inline V16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline V16 add(V16 x, V16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V16 sub(V16 x, V16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V16 mul(V16 x, V16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V16 div(V16 x, V16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline V16 max(V16 x, V16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline V16 min(V16 x, V16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline V16 fma(V16 x, V16 y, V16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline V16 where_less(V16 a, V16 b, V16 x, V16 y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
}
inline V16 round(V16 x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, kMode), _mm256_round_ps(x.b, kMode)};
}
inline __m256 exp2_whole8(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline V16 exp2_whole(V16 n) { return {exp2_whole8(n.a), exp2_whole8(n.b)}; }
inline __m256i bytes32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline V16 bf16_even(const uint8_t* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(bytes32(p), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(bytes32(p + 32), 16))};
}
inline V16 bf16_odd(const uint8_t* p) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return {_mm256_castsi256_ps(_mm256_and_si256(bytes32(p), mask)),
          _mm256_castsi256_ps(_mm256_and_si256(bytes32(p + 32), mask))};
}
inline __m256 load_bf16_8(const uint16_t* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline V16 load_bf16(const uint16_t* p) { return {load_bf16_8(p), load_bf16_8(p + 8)}; }
inline V16 load_half(const uint8_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}

inline V16 first_lanes(V16 x, int64_t count, float rest) {
  if (count >= 16) return x;
  alignas(32) float lane[16];
  store(lane, x);
  for (int64_t i = count; i < 16; ++i) lane[i] = rest;
  return load(lane);
}

struct I16 {
  __m256i a, b;
};
inline I16 iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline V16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline __m256i four_bytes(const int8_t* x) {
  int32_t packed;
  std::memcpy(&packed, x, 4);
  return _mm256_set1_epi32(packed);
}
// Pairs of unsigned × signed bytes stay below 2^15 here, so that nothing saturates.
inline __m256i dot4(__m256i acc, __m256i unsigned_w, __m256i signed_x) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(unsigned_w, signed_x), _mm256_set1_epi16(1)));
}
inline I16 dot_nibbles(const uint8_t* w, const int8_t* x, int32_t offset) {
  const __m256i mask = _mm256_set1_epi8(15);
  I16 acc = iset1(offset);
  for (int r = 0; r < 4; ++r) {
    const __m256i low = four_bytes(x + 4 * r), high = four_bytes(x + 16 + 4 * r);
    const __m256i p = bytes32(w + 64 * r), q = bytes32(w + 64 * r + 32);
    acc.a = dot4(dot4(acc.a, _mm256_and_si256(p, mask), low), _mm256_and_si256(_mm256_srli_epi16(p, 4), mask), high);
    acc.b = dot4(dot4(acc.b, _mm256_and_si256(q, mask), low), _mm256_and_si256(_mm256_srli_epi16(q, 4), mask), high);
  }
  return acc;
}
inline I16 dot_group(const uint8_t* w, const int8_t* x, int32_t) {
  I16 acc = iset1(0);
  for (int r = 0; r < 8; ++r) {
    const __m256i packed = four_bytes(x + 4 * r), p = bytes32(w + 64 * r), q = bytes32(w + 64 * r + 32);
    acc.a = dot4(acc.a, _mm256_abs_epi8(p), _mm256_sign_epi8(packed, p));
    acc.b = dot4(acc.b, _mm256_abs_epi8(q), _mm256_sign_epi8(packed, q));
  }
  return acc;
}

#endif

#ifdef __AVX512F__
// Sixteen rows of sixteen lanes become columns.
inline void transpose(V16* r) {
  __m512 t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i].v, r[2 * i + 1].v);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i].v, r[2 * i + 1].v);
  }
  __m512 u[16];
  for (int i = 0; i < 4; ++i) {
    const auto pair = [&](int a) { return _mm512_castps_pd(t[4 * i + a]); };
    u[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pair(0), pair(2)));
    u[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pair(0), pair(2)));
    u[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pair(1), pair(3)));
    u[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pair(1), pair(3)));
  }
  for (int c = 0; c < 4; ++c) {
    const __m512 a = _mm512_shuffle_f32x4(u[c], u[4 + c], 0x88), b = _mm512_shuffle_f32x4(u[c], u[4 + c], 0xdd);
    const __m512 d = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0x88), e = _mm512_shuffle_f32x4(u[8 + c], u[12 + c], 0xdd);
    r[c] = {_mm512_shuffle_f32x4(a, d, 0x88)};
    r[4 + c] = {_mm512_shuffle_f32x4(b, e, 0x88)};
    r[8 + c] = {_mm512_shuffle_f32x4(a, d, 0xdd)};
    r[12 + c] = {_mm512_shuffle_f32x4(b, e, 0xdd)};
  }
}
#else
inline void transpose(V16* r) {
  alignas(32) float in[16][16], out[16][16];
  for (int i = 0; i < 16; ++i) store(in[i], r[i]);
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) out[j][i] = in[i][j];
  for (int i = 0; i < 16; ++i) r[i] = load(out[i]);
}
#endif

// Lanes added in a fixed order.
inline float sum(V16 x) {
  alignas(64) float lane[16];
  store(lane, x);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}

inline float max_of(V16 x) {
  alignas(64) float lane[16];
  store(lane, x);
  float best = lane[0];
  for (int i = 1; i < 16; ++i) best = lane[i] > best ? lane[i] : best;
  return best;
}

// exp to about one unit in the last place; below −87 it is 0 rather than subnormal.
inline V16 exp(V16 x) {
  const V16 clamped = min(max(x, set1(-87.0f)), set1(88.0f));
  const V16 n = round(mul(clamped, set1(1.44269504f)));
  V16 r = fma(n, set1(-0.693359375f), clamped);
  r = fma(n, set1(2.12194440e-4f), r);
  V16 p = set1(1.9875691500e-4f);  // Cephes' expf
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  return mul(p, exp2_whole(n));
}

inline V16 sigmoid(V16 x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }

// Near 0 Cephes' polynomial, elsewhere 1 − 2/(exp(2x) + 1).
inline V16 tanh(V16 x) {
  const V16 z = mul(x, x);
  V16 p = set1(-5.70498872745e-3f);
  p = fma(p, z, set1(2.06390887954e-2f));
  p = fma(p, z, set1(-5.37397155531e-2f));
  p = fma(p, z, set1(1.33314422036e-1f));
  p = fma(p, z, set1(-3.33332819422e-1f));
  const V16 near_zero = fma(mul(p, z), x, x);
  const V16 elsewhere = sub(set1(1.0f), div(set1(2.0f), add(exp(add(x, x)), set1(1.0f))));
  return where_less(z, set1(0.390625f), near_zero, elsewhere);  // |x| < 0.625
}

}  // namespace redraft::ISA
