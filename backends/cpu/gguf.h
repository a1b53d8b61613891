// Linears of GGUF weights that stay packed: codes of 4 to 8 bits times activations of 8 bits.
//
// A weight's value is code * scale + offset, with a scale and an offset for a group of 32 or 16
// neighbours in a row. Activations are rounded, 32 at a time, to q * d with q in int8. So
//
//   sum of w x  =  sum over groups of  scale * d * sum(code * q)  +  offset * d * sum(q)
//
// where the inner sums are exact, in integers, and those of q are known before any weight is read.
//
// A packed weight is a list of panels of 16 rows, a lane each, so that no sum crosses lanes; a
// panel is a list of blocks, of 32 codes a row, and its rows' scales beside them: a thread reads
// one stream, once, for up to 8 tokens. Values and sizes stay those of the file (scales of the
// types with a K, 6 bits there, take 8).

#pragma once

#include "vectors.h"

namespace {
namespace gguf {

constexpr int ROWS = LANES;   // of a panel
constexpr int BLOCK = 32;     // values of a row, in a block
constexpr int CODES = 8;      // vectors of 4 codes a lane
constexpr int MAX_TILE = 8;   // tokens
constexpr int MAX_GROUPS = 2;

enum class Type : int32_t { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };  // gguf.py has its twin

// How panels of a type lie. BITS of a code, ZERO the code that stands for 0 (offset = -ZERO *
// scale) unless HAS_OFFSET, GROUP codes that share a scale. A scale is a float16, but of types with
// a K an integer times the float16 of a superblock of 8 blocks.
template <int BITS_, int ZERO_, bool HAS_OFFSET_, int GROUP, bool IS_K_>
struct Format {
  static constexpr int BITS = BITS_, ZERO = ZERO_, GROUPS = BLOCK / GROUP;
  static constexpr bool HAS_OFFSET = HAS_OFFSET_, IS_K = IS_K_;
  static constexpr int BLOCKS = IS_K ? 8 : 1;  // of a superblock
  static constexpr int CODE_BYTES = ROWS * BLOCK * BITS / 8;
  static constexpr int SCALE_BYTES = ROWS * (IS_K ? GROUPS + HAS_OFFSET : 2 + 2 * HAS_OFFSET);
  static constexpr int BLOCK_BYTES = CODE_BYTES + SCALE_BYTES;
  static constexpr int HEADER_BYTES = IS_K ? ROWS * (2 + 2 * HAS_OFFSET) : 0;
  static constexpr int SUPERBLOCK_BYTES = HEADER_BYTES + BLOCKS * BLOCK_BYTES;
  // In the file: of a row's superblock.
  static constexpr int RAW_BYTES =
      IS_K ? BLOCK * BITS + (GROUPS == 2 ? 18 : 16) : 4 * BITS + 2 + 2 * HAS_OFFSET;
};

// Calls f with a Format of the type.
template <class F>
inline void with_format(Type type, F&& f) {
  switch (type) {
    case Type::Q4_0: return f(Format<4, 8, false, 32, false>{});
    case Type::Q4_1: return f(Format<4, 0, true, 32, false>{});
    case Type::Q5_0: return f(Format<5, 16, false, 32, false>{});
    case Type::Q5_1: return f(Format<5, 0, true, 32, false>{});
    case Type::Q8_0: return f(Format<8, 128, false, 32, false>{});
    case Type::Q4_K: return f(Format<4, 0, true, 32, true>{});
    case Type::Q5_K: return f(Format<5, 0, true, 32, true>{});
    case Type::Q6_K: return f(Format<6, 32, false, 16, true>{});
  }
}

// ---- Packing ------------------------------------------------------------------------------------

// A row's block in the file: codes, and bytes of its scales as they lie in a panel.
struct RawBlock {
  uint8_t codes[BLOCK];
  uint8_t header[4];  // of types with a K: d and dmin
  uint8_t scales[4];
};

inline void add_nibbles(const uint8_t* qs, uint8_t* codes) {
  for (int i = 0; i < BLOCK / 2; ++i) {
    codes[i] = qs[i] & 15;
    codes[i + BLOCK / 2] = qs[i] >> 4;
  }
}

template <class F>
RawBlock read_raw(const uint8_t* raw, int block) {
  RawBlock to;
  if constexpr (!F::IS_K) {  // d, offset, fifth bits, codes
    std::memcpy(to.scales, raw, F::SCALE_BYTES / ROWS);
    raw += F::SCALE_BYTES / ROWS;
    if constexpr (F::BITS == 8) {
      for (int i = 0; i < BLOCK; ++i) to.codes[i] = raw[i] ^ 0x80;  // q + 128
      return to;
    }
    add_nibbles(raw + (F::BITS == 5 ? 4 : 0), to.codes);
    if constexpr (F::BITS == 5)
      for (int i = 0; i < BLOCK; ++i) to.codes[i] |= (raw[i / 8] >> i % 8 & 1) << 4;
  } else if constexpr (F::GROUPS == 2) {  // Q6_K: low bits, high bits, scales, d
    const int half = block / 4, quarter = block % 4;
    const uint8_t *low = raw + 64 * half + 32 * (quarter % 2), *high = raw + 128 + 32 * half;
    for (int i = 0; i < BLOCK; ++i)
      to.codes[i] = (low[i] >> 4 * (quarter / 2) & 15) | (high[i] >> 2 * quarter & 3) << 4;
    std::memcpy(to.scales, raw + 192 + 2 * block, 2);
    std::memcpy(to.header, raw + 208, 2);
  } else {  // Q4_K, Q5_K: d, dmin, scales and offsets of 6 bits, fifth bits, codes
    std::memcpy(to.header, raw, 4);
    const uint8_t *s = raw + 4, *high = raw + 16, *low = high + (F::BITS == 5 ? 32 : 0);
    const int i = block;
    to.scales[0] = i < 4 ? s[i] & 63 : (s[i + 4] & 15) | s[i - 4] >> 6 << 4;
    to.scales[1] = i < 4 ? s[i + 4] & 63 : s[i + 4] >> 4 | s[i] >> 6 << 4;
    for (int k = 0; k < BLOCK; ++k) {
      to.codes[k] = low[32 * (i / 2) + k] >> 4 * (i % 2) & 15;
      if constexpr (F::BITS == 5) to.codes[k] |= (high[k] >> i & 1) << 4;
    }
  }
  return to;
}

// Codes of one row into its lane. Of 4 bits and more, the lower 4 of codes 4 i and 4 i + 16 share
// a byte of vector i; the rest follow, so that a shift brings those of vector i to their place.
template <class F>
void put_codes(const uint8_t (&codes)[BLOCK], int row, uint8_t* block) {
  for (int i = 0; i < BLOCK; ++i) {
    uint8_t* at = block + row * 4 + i % 4;
    const int vector = i / 4, high = codes[i] >> 4;
    if (F::BITS == 8) {
      at[vector * 64] = codes[i];
      continue;
    }
    at[vector % 4 * 64] |= (codes[i] & 15) << vector / 4 * 4;
    if (F::BITS == 5) at[256] |= high << vector;
    if (F::BITS == 6) at[256 + vector / 4 * 64] |= high << vector % 4 * 2;
  }
}

// Raw rows [num_out][row] of the file to panels, which are zero before.
template <class F>
void pack(const uint8_t* raw, int64_t num_in, int64_t num_out, uint8_t* packed) {
  const int64_t supers = num_in / (BLOCK * F::BLOCKS);
  const int64_t num_panels = (num_out + ROWS - 1) / ROWS;
#pragma omp parallel for
  for (int64_t p = 0; p < num_panels; ++p)
    for (int64_t row = 0; row < std::min<int64_t>(ROWS, num_out - p * ROWS); ++row)
      for (int64_t s = 0; s < supers; ++s) {
        const uint8_t* from = raw + ((p * ROWS + row) * supers + s) * F::RAW_BYTES;
        uint8_t* to = packed + (p * supers + s) * F::SUPERBLOCK_BYTES;
        for (int b = 0; b < F::BLOCKS; ++b) {
          const RawBlock block = read_raw<F>(from, b);
          uint8_t* at = to + F::HEADER_BYTES + b * F::BLOCK_BYTES;
          put_codes<F>(block.codes, row, at);
          at += F::CODE_BYTES;
          // All rows' scales, then all rows' offsets (or scales of the second group).
          constexpr int SIZE = F::IS_K ? 1 : 2, NUM = F::SCALE_BYTES / ROWS / SIZE;
          for (int i = 0; i < NUM; ++i)
            std::memcpy(at + (i * ROWS + row) * SIZE, block.scales + i * SIZE, SIZE);
          for (int i = 0; i < F::HEADER_BYTES / ROWS / 2; ++i)
            std::memcpy(to + (i * ROWS + row) * 2, block.header + i * 2, 2);
        }
      }
}

// ---- Reading a panel ----------------------------------------------------------------------------

inline __m512i load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline __m512i only(__m512i x, int byte) {
  return _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(byte)));
}

// x's bits are brought to 4 places higher than `from`.
template <int FROM>
inline __m512i to_fifth(__m512i x) {
  if constexpr (FROM < 4) return _mm512_slli_epi32(x, 4 - FROM);
  return _mm512_srli_epi32(x, FROM - 4);
}

template <class F, int I>
inline __m512i high_codes(const uint8_t* block) {
  if constexpr (F::BITS == 5) return only(to_fifth<I>(load_codes(block + 256)), 0x10);
  if constexpr (F::BITS == 6)
    return only(to_fifth<I % 4 * 2>(load_codes(block + 256 + I / 4 * 64)), 0x30);
  return _mm512_setzero_si512();
}

// Lane r of vector i: row r's codes 4 i to 4 i + 3.
template <class F, int... I>
[[gnu::always_inline]] inline void read_codes(const uint8_t* block, __m512i (&codes)[CODES],
                                              std::integer_sequence<int, I...>) {
  if constexpr (F::BITS == 8) {
    ((codes[I] = load_codes(block + I * 64)), ...);
    return;
  }
  ((codes[I] = only(I < 4 ? load_codes(block + I * 64)
                          : _mm512_srli_epi32(load_codes(block + I % 4 * 64), 4), 0x0F)), ...);
  if constexpr (F::BITS > 4)
    ((codes[I] = _mm512_or_si512(codes[I], high_codes<F, I>(block))), ...);
}

inline Vec load_halves(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Vec load_bytes(const uint8_t* p, bool is_signed) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(x) : _mm512_cvtepu8_epi32(x));
}

// A block's values are code * scale + offset, by group of codes; lanes are rows.
template <class F>
struct Block {
  __m512i codes[CODES];
  Vec scale[F::GROUPS], offset[F::GROUPS];

  [[gnu::always_inline]] Block(const uint8_t* superblock, int b) {
    const uint8_t* block = superblock + F::HEADER_BYTES + b * F::BLOCK_BYTES;
    read_codes<F>(block, codes, std::make_integer_sequence<int, CODES>());
    const uint8_t* scales = block + F::CODE_BYTES;
    if constexpr (F::IS_K) {
      const Vec d = load_halves(superblock);
      for (int g = 0; g < F::GROUPS; ++g)
        scale[g] = _mm512_mul_ps(d, load_bytes(scales + g * ROWS, F::GROUPS == 2));
      if constexpr (F::HAS_OFFSET)  // of the types with a K, it is subtracted
        offset[0] = _mm512_mul_ps(_mm512_sub_ps(_mm512_setzero_ps(), load_halves(superblock + 32)),
                                  load_bytes(scales + ROWS, false));
    } else {
      scale[0] = load_halves(scales);
      if constexpr (F::HAS_OFFSET) offset[0] = load_halves(scales + 32);
    }
    if constexpr (!F::HAS_OFFSET)
      for (int g = 0; g < F::GROUPS; ++g)
        offset[g] = _mm512_mul_ps(scale[g], _mm512_set1_ps(-F::ZERO));
  }
};

// ---- Activations --------------------------------------------------------------------------------

// 32 inputs of a token: q * d, and d times the sums of both halves' q, and of all.
struct Inputs {
  float d, sum, half_sums[2];
  int8_t q[BLOCK];
};

// d is the largest magnitude / 127. Of numbers that are not finite, d is not, either.
template <class T>
inline void round_inputs(const T* x, Inputs& to) {
  const Vec halves[2] = {load(x), load(x + LANES)};
  const __m512i sign = _mm512_set1_epi32(0x7FFFFFFF);
  __m512i largest = _mm512_setzero_si512();  // as integers magnitudes have the same order
  for (Vec half : halves)
    largest = _mm512_max_epi32(largest, _mm512_and_si512(_mm512_castps_si512(half), sign));
  const int32_t bits = _mm512_reduce_max_epi32(largest);
  float magnitude;
  std::memcpy(&magnitude, &bits, 4);
  to.d = magnitude * (1.0f / 127);
  const Vec inverse = _mm512_set1_ps(magnitude > 1e-30f ? 127 / magnitude : 0.0f);
  for (int h = 0; h < 2; ++h) {
    const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(halves[h], inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to.q + h * LANES), _mm512_cvtepi32_epi8(q));
    to.half_sums[h] = to.d * _mm512_reduce_add_epi32(q);
  }
  to.sum = to.half_sums[0] + to.half_sums[1];
}

// ---- The product --------------------------------------------------------------------------------

// acc + code * q of 4 codes a lane, and the 4 q that `q` points to.
inline __m512i multiply_add(__m512i acc, __m512i codes, const int8_t* q) {
  int32_t four;
  std::memcpy(&four, q, 4);
  const __m512i word = _mm512_set1_epi32(four);
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(acc, codes, word);
#else
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0xFF)),
                                         _mm512_srai_epi16(_mm512_slli_epi16(word, 8), 8));
  const __m512i odd =
      _mm512_madd_epi16(_mm512_srli_epi16(codes, 8), _mm512_srai_epi16(word, 8));
  return _mm512_add_epi32(acc, _mm512_add_epi32(even, odd));
#endif
}

// out[token][row of the panel], of tokens whose inputs lie `stride` apart.
template <class F, int TOKENS>
void multiply(const uint8_t* panel, int64_t num_in, const Inputs* x, int64_t stride,
              float (*out)[ROWS]) {
  constexpr int STEPS = CODES / F::GROUPS;
  Vec acc[TOKENS];
#pragma GCC unroll 8
  for (Vec& a : acc) a = _mm512_setzero_ps();
  for (int64_t s = 0; s < num_in / (BLOCK * F::BLOCKS); ++s, panel += F::SUPERBLOCK_BYTES)
    for (int b = 0; b < F::BLOCKS; ++b, ++x) {
      const Block<F> block(panel, b);
#pragma GCC unroll 8
      for (int t = 0; t < TOKENS; ++t) {
        const Inputs& in = x[t * stride];
        Vec sum = _mm512_setzero_ps();
#pragma GCC unroll 2
        for (int g = 0; g < F::GROUPS; ++g) {
          __m512i dot = _mm512_setzero_si512();
#pragma GCC unroll 8
          for (int i = g * STEPS; i < (g + 1) * STEPS; ++i)
            dot = multiply_add(dot, block.codes[i], in.q + i * 4);
          sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), block.scale[g], sum);
        }
        acc[t] = _mm512_fmadd_ps(sum, _mm512_set1_ps(in.d), acc[t]);
#pragma GCC unroll 2
        for (int g = 0; g < F::GROUPS; ++g) {
          const float in_sum = F::GROUPS == 1 ? in.sum : in.half_sums[g];
          acc[t] = _mm512_fmadd_ps(block.offset[g], _mm512_set1_ps(in_sum), acc[t]);
        }
      }
    }
#pragma GCC unroll 8
  for (int t = 0; t < TOKENS; ++t) _mm512_storeu_ps(out[t], acc[t]);
}

// A weight, or some rows of one whose rows differ in type; gguf.py has its twin.
struct Part {
  const uint8_t* packed;
  int64_t num_out;
  Type type;
};

static_assert(sizeof(Part) == 24, "gguf.py");

inline int64_t panels_of(const Part& part) { return (part.num_out + ROWS - 1) / ROWS; }

inline int64_t panel_bytes(Type type, int64_t num_in) {
  int64_t bytes = 0;
  with_format(type, [&](auto format) {
    using F = decltype(format);
    bytes = num_in / (BLOCK * F::BLOCKS) * F::SUPERBLOCK_BYTES;
  });
  return bytes;
}

constexpr int64_t CACHED_BYTES = 384 << 10;  // of inputs, beside a panel in L2
constexpr int64_t ROUND_GRAIN = 1 << 14;     // elements, below which one thread rounds them

template <class T, class Out>
void linear(const T* x, int64_t x_stride, int64_t num_tokens, const Part* parts, int64_t num_parts,
            const T* bias, int64_t num_in, int64_t num_out, Out* out) {
  static thread_local std::vector<Inputs> own;
  std::vector<Inputs>& inputs = own;  // the team must see this thread's
  const int64_t stride = num_in / BLOCK;
  inputs.resize(num_tokens * stride);
#pragma omp parallel for if (num_tokens * num_in > ROUND_GRAIN)
  for (int64_t token = 0; token < num_tokens; ++token)
    for (int64_t b = 0; b < stride; ++b)
      round_inputs(x + token * x_stride + b * BLOCK, inputs[token * stride + b]);

  int64_t num_panels = 0;
  for (int64_t i = 0; i < num_parts; ++i) num_panels += panels_of(parts[i]);
  const int64_t num_tiles = (num_tokens + MAX_TILE - 1) / MAX_TILE;
  const int64_t tile_bytes = MAX_TILE * stride * static_cast<int64_t>(sizeof(Inputs));
  const int64_t block_tiles = std::max<int64_t>(1, CACHED_BYTES / tile_bytes);
  for (int64_t first = 0; first < num_tiles; first += block_tiles) {
    const int64_t last = std::min(num_tiles, first + block_tiles);
#pragma omp parallel for schedule(dynamic, 3)
    for (int64_t p = 0; p < num_panels; ++p) {
      const Part* part = parts;
      int64_t panel = p, column = 0;
      for (; panel >= panels_of(*part); ++part) {
        panel -= panels_of(*part);
        column += part->num_out;
      }
      const __mmask16 lanes = first_lanes(part->num_out - panel * ROWS);
      column += panel * ROWS;
      const uint8_t* packed = part->packed + panel * panel_bytes(part->type, num_in);
      const Vec b = bias ? load(bias + column, lanes) : _mm512_setzero_ps();
      for (int64_t tile = first; tile < last; ++tile) {
        const int64_t begin = num_tokens * tile / num_tiles;
        const int64_t end = num_tokens * (tile + 1) / num_tiles;
        float products[MAX_TILE][ROWS];
        with_format(part->type, [&](auto format) {
          with_rows<MAX_TILE>(end - begin, [&](auto tokens) {
            multiply<decltype(format), tokens>(packed, num_in, inputs.data() + begin * stride,
                                               stride, products);
          });
        });
        for (int64_t t = begin; t < end; ++t)
          store(out + t * num_out + column, _mm512_add_ps(load(products[t - begin]), b), lanes);
      }
    }
  }
}

// Values of one row of a weight, as of an embedding.
template <class F, class T>
void read_row(const uint8_t* packed, int64_t num_in, int64_t row, T* out) {
  const uint8_t* panel = packed + row / ROWS * (num_in / (BLOCK * F::BLOCKS)) * F::SUPERBLOCK_BYTES;
  const int lane = row % ROWS;
  for (int64_t s = 0; s < num_in / (BLOCK * F::BLOCKS); ++s, panel += F::SUPERBLOCK_BYTES)
    for (int b = 0; b < F::BLOCKS; ++b, out += BLOCK) {
      const Block<F> block(panel, b);
      alignas(64) uint8_t codes[BLOCK];
      alignas(64) uint8_t four[ROWS][4];
      alignas(64) float scale[ROWS], offset[ROWS], values[BLOCK];
      for (int i = 0; i < CODES; ++i) {
        _mm512_store_si512(four, block.codes[i]);
        std::memcpy(codes + i * 4, four[lane], 4);
      }
      for (int i = 0; i < BLOCK; ++i) {
        const int g = i * F::GROUPS / BLOCK;
        if (i % (BLOCK / F::GROUPS) == 0) {
          _mm512_store_ps(scale, block.scale[g]);
          _mm512_store_ps(offset, block.offset[g]);
        }
        values[i] = codes[i] * scale[lane] + offset[lane];
      }
      for (int h = 0; h < 2; ++h) store(out + h * LANES, load(values + h * LANES));
    }
}

template <class T>
void read_rows(const Part& part, int64_t num_in, const int64_t* rows, int64_t num_rows, T* out) {
  with_format(part.type, [&](auto format) {
    for (int64_t i = 0; i < num_rows; ++i)
      read_row<decltype(format)>(part.packed, num_in, rows[i], out + i * num_in);
  });
}

}  // namespace gguf
}  // namespace
