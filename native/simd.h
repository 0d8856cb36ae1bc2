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

inline void store_first(float* p, V16 a, int64_t count) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), a.v);
}

struct I16 {
  __m512i v;
};
inline I16 iset1(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I16 add(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline V16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I16 to_int(V16 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline I16 load_unsigned_bytes(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline I16 load_signed_bytes(const uint8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline __m128i to_bytes(I16 a) { return _mm512_cvtsepi32_epi8(a.v); }

// Four bytes for each of sixteen lanes.
struct Bytes {
  __m512i v;
};
inline Bytes load_lanes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Bytes four_bytes(const int8_t* x) {
  int32_t packed;
  std::memcpy(&packed, x, 4);
  return {_mm512_set1_epi32(packed)};
}
inline Bytes mask(Bytes a, int bits) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(static_cast<char>(bits)))}; }
inline Bytes either(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int kBits>  // also across bytes: mask what comes from a neighbour
inline Bytes shift_right(Bytes a) {
  return {kBits >= 0 ? _mm512_srli_epi16(a.v, kBits >= 0 ? kBits : 0) : _mm512_slli_epi16(a.v, kBits >= 0 ? 0 : -kBits)};
}
// `value` in the bytes whose bit is set in the 64 bits at p.
inline Bytes where_bits(const uint8_t* p, int value) {
  uint64_t bits;
  std::memcpy(&bits, p, 8);
  return {_mm512_maskz_set1_epi8(bits, static_cast<char>(value))};
}
// Each lane's sum of four products of unsigned and signed bytes, added to acc.
inline I16 dot4(I16 acc, Bytes unsigned_w, Bytes signed_x) {
  return {_mm512_dpbusd_epi32(acc.v, unsigned_w.v, signed_x.v)};
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

inline void store_first(float* p, V16 x, int64_t count) {
  if (count >= 16) return store(p, x);
  alignas(32) float lane[16];
  store(lane, x);
  std::memcpy(p, lane, static_cast<size_t>(count) * sizeof(float));
}

struct I16 {
  __m256i a, b;
};
inline I16 iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I16 add(I16 x, I16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline V16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I16 to_int(V16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline __m128i bytes8(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
inline I16 load_unsigned_bytes(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(bytes8(p)), _mm256_cvtepu8_epi32(bytes8(p + 8))};
}
inline I16 load_signed_bytes(const uint8_t* p) {
  return {_mm256_cvtepi8_epi32(bytes8(p)), _mm256_cvtepi8_epi32(bytes8(p + 8))};
}
inline __m128i to_bytes(I16 x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

// Four bytes for each of sixteen lanes.
struct Bytes {
  __m256i a, b;
};
inline Bytes load_lanes(const uint8_t* p) { return {bytes32(p), bytes32(p + 32)}; }
inline Bytes four_bytes(const int8_t* x) {
  int32_t packed;
  std::memcpy(&packed, x, 4);
  return {_mm256_set1_epi32(packed), _mm256_set1_epi32(packed)};
}
inline Bytes mask(Bytes x, int bits) {
  const __m256i m = _mm256_set1_epi8(static_cast<char>(bits));
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
inline Bytes either(Bytes x, Bytes y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
template <int kBits>  // also across bytes: mask what comes from a neighbour
inline Bytes shift_right(Bytes x) {
  if constexpr (kBits < 0) return {_mm256_slli_epi16(x.a, -kBits), _mm256_slli_epi16(x.b, -kBits)};
  return {_mm256_srli_epi16(x.a, kBits), _mm256_srli_epi16(x.b, kBits)};
}
inline __m256i where_bits32(const uint8_t* p, int value) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  const __m256i byte_of_lane = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3,
                                                3, 3, 3, 3, 3, 3, 3);
  const __m256i bit_of_lane = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), byte_of_lane);
  const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit_of_lane), bit_of_lane);
  return _mm256_and_si256(is_set, _mm256_set1_epi8(static_cast<char>(value)));
}
// `value` in the bytes whose bit is set in the 64 bits at p.
inline Bytes where_bits(const uint8_t* p, int value) { return {where_bits32(p, value), where_bits32(p + 4, value)}; }
inline __m256i dot4(__m256i acc, __m256i unsigned_w, __m256i signed_x) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(unsigned_w, signed_x), _mm256_set1_epi16(1)));
}
// Each lane's sum of four products of unsigned bytes up to 128 and signed ones, added to acc: of such, two products
// stay within 16 bits.
inline I16 dot4(I16 acc, Bytes unsigned_w, Bytes signed_x) {
  return {dot4(acc.a, unsigned_w.a, signed_x.a), dot4(acc.b, unsigned_w.b, signed_x.b)};
}
inline I16 signed_dot4(I16 acc, Bytes signed_w, Bytes signed_x) {
  return {dot4(acc.a, _mm256_abs_epi8(signed_w.a), _mm256_sign_epi8(signed_x.a, signed_w.a)),
          dot4(acc.b, _mm256_abs_epi8(signed_w.b), _mm256_sign_epi8(signed_x.b, signed_w.b))};
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

#ifdef __AVX512F__
inline float max_of(V16 x) { return _mm512_reduce_max_ps(x.v); }
#else
inline float max_of(V16 x) {
  const __m256 eight = _mm256_max_ps(x.a, x.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}
#endif

// Whole numbers within ±127 to 32 bytes at p → the sums of the first and of the last sixteen.
struct Sums {
  int32_t first, last;
};
inline Sums store_bytes(int8_t* p, I16 first, I16 last) {
  const __m256i bytes = _mm256_set_m128i(to_bytes(last), to_bytes(first));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bytes);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
  __m256i sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4e));
  sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xb1));
  return {_mm256_cvtsi256_si32(sums), _mm_cvtsi128_si32(_mm256_extracti128_si256(sums, 1))};
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
