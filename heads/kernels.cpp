// Decoder layers of the Llama family over few rows, at the speed at which the memory hands out the weights.
//
// A row comes out to the same bits however many are computed with it: every sum runs over its 16 lanes in one order.
// In bfloat16 values are rounded where the operations of torch round them, sums are in float32.
//
// T rows; I inputs and O outputs of a product; D hidden size; F size between gate and down; H query heads, K key heads,
// Dh head size; S tokens of a block. Weights are [O, I], rows of states [T, D].

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

#include <immintrin.h>
#include <omp.h>

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__)
#error "made for AVX-512"
#endif

namespace {

constexpr int LANES = 16;
typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));

struct Bfloat16 {
    uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(Bfloat16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

template <typename A> inline A from_float(float value);

template <> inline float from_float<float>(float value) { return value; }

template <> inline Bfloat16 from_float<Bfloat16>(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return {uint16_t((bits >> 16) | 0x40)};
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// What is left of a value that is kept as an A.
template <typename A> inline float rounded(float value) { return to_float(from_float<A>(value)); }

inline Lanes load(const float* from) {
    Lanes lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

inline float sum_of(Lanes lanes) { return _mm512_reduce_add_ps((__m512)lanes); }

// The sums of 16 lanes each, of `many[4 * g + c]` in lane `4 * c + g`; whatever the others are, each in one order.
inline Lanes sums_of(const Lanes (&many)[16]) {
#define HALVES(shuffle, a, b, lower, upper) (shuffle(a, b, lower) + shuffle(a, b, upper))
    __m512 groups[4];
#pragma GCC unroll 4
    for (int group = 0; group < 4; ++group) {
        const Lanes* of = many + 4 * group;
        __m512 first = HALVES(_mm512_shuffle_f32x4, (__m512)of[0], (__m512)of[1], 0x44, 0xee);
        __m512 second = HALVES(_mm512_shuffle_f32x4, (__m512)of[2], (__m512)of[3], 0x44, 0xee);
        groups[group] = HALVES(_mm512_shuffle_f32x4, first, second, 0x88, 0xdd);
    }
    __m512 first = HALVES(_mm512_shuffle_ps, groups[0], groups[1], 0x44, 0xee);
    __m512 second = HALVES(_mm512_shuffle_ps, groups[2], groups[3], 0x44, 0xee);
    return (Lanes)HALVES(_mm512_shuffle_ps, first, second, 0x88, 0xdd);
#undef HALVES
}

// e^x within two units in the last place; 0 far below.
inline Lanes exp_of(Lanes x) {
    const Lanes lowest = Lanes{} - 87.0f, highest = Lanes{} + 88.0f;
    Ints is_low = x < lowest;
    x = x < lowest ? lowest : x;
    x = x > highest ? highest : x;
    Lanes halves = x * 1.44269504f;
    Ints whole = __builtin_convertvector(halves + (halves < Lanes{} ? Lanes{} - 0.5f : Lanes{} + 0.5f), Ints);
    Lanes n = __builtin_convertvector(whole, Lanes);
    Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Ints power = (whole + 127) << 23;
    Lanes result = p * (Lanes)power;
    return is_low ? Lanes{} : result;
}

// Weights. A kind says how many bytes hold 32 values of a row, how these become two times 16 lanes of float32, and
// which input belongs to which lane.

constexpr int PIECE = 2 * LANES;

struct Float32Weight {
    static constexpr int BYTES = 4 * PIECE;
    static void widen(const char* from, Lanes& first, Lanes& second) {
        std::memcpy(&first, from, sizeof first);
        std::memcpy(&second, from + sizeof first, sizeof second);
    }
    static int place(int index) { return index; }
};

struct Bfloat16Weight {
    static constexpr int BYTES = 2 * PIECE;
    // Pairs of values as they lie: the lower one moved up, and the upper one by itself.
    static void widen(const char* from, Lanes& first, Lanes& second) {
        Bits pairs;
        std::memcpy(&pairs, from, sizeof pairs);
        first = (Lanes)(pairs << 16);
        second = (Lanes)(pairs & 0xffff0000u);
    }
    static int place(int index) { return index / 2 + index % 2 * LANES; }
};

struct Float16Weight {
    static constexpr int BYTES = 2 * PIECE;
    static void widen(const char* from, Lanes& first, Lanes& second) {
        first = (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
        second = (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + 1));
    }
    static int place(int index) { return index; }
};

// A step and a lowest value in float32, then 32 numbers of steps of four bits: byte j has those of values j and j + 16.
struct FourBitWeight {
    static constexpr int BYTES = 8 + PIECE / 2;
    static void widen(const char* from, Lanes& first, Lanes& second) {
        const Lanes numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        float step, lowest;
        std::memcpy(&step, from, 4);
        std::memcpy(&lowest, from + 4, 4);
        __m512 values = (__m512)(numbers * step);
        asm("" : "+v"(values));  // rounded before the sum, as whoever made the weights did
        values = (__m512)((Lanes)values + lowest);
        const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8)));
        first = (Lanes)_mm512_permutexvar_ps(pairs, values);
        second = (Lanes)_mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), values);
    }
    static int place(int index) { return index; }
};

// A step in float32, then 32 signed numbers of steps of eight bits.
struct EightBitWeight {
    static constexpr int BYTES = 4 + PIECE;
    static void widen(const char* from, Lanes& first, Lanes& second) {
        float step;
        std::memcpy(&step, from, 4);
        first = (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(halves(from)[0])) * step;
        second = (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(halves(from)[1])) * step;
    }
    static const __m128i_u* halves(const char* from) { return reinterpret_cast<const __m128i_u*>(from + 4); }
    static int place(int index) { return index; }
};

// Inputs of a product in the order of its weight, padded with zeros to whole pieces.
template <typename W> class Inputs {
  public:
    Inputs(int64_t num_rows, int64_t size) : stride((size + PIECE - 1) / PIECE * PIECE), size(size) {
        thread_local std::vector<Lanes> memory;  // not of floats: pieces would lie across the machine's lines
        if (int64_t(memory.size()) * LANES < num_rows * stride) memory.resize(num_rows * stride / LANES);
        values = reinterpret_cast<float*>(memory.data());
        for (int64_t row = 0; row < num_rows; ++row)
            std::fill(values + row * stride + size / PIECE * PIECE, values + (row + 1) * stride, 0.0f);
    }
    void set(int64_t row, int64_t index, float value) {
        values[row * stride + index / PIECE * PIECE + W::place(int(index % PIECE))] = value;
    }
    float* values;
    int64_t stride, size;
};

// The sums of R outputs for T rows, [T, R] in `sums`.
template <typename W, int R, int T>
void tile(const char* weight, const float* inputs, int64_t size, int64_t stride, float* sums, int64_t sums_stride) {
    Lanes total[R][T] = {};
    const int64_t whole = size / PIECE, row_bytes = size * W::BYTES / PIECE;
    for (int64_t piece = 0; piece < whole; ++piece) {
        Lanes first[T], second[T];
#pragma GCC unroll 8
        for (int row = 0; row < T; ++row) {
            first[row] = load(inputs + row * stride + piece * PIECE);
            second[row] = load(inputs + row * stride + piece * PIECE + LANES);
        }
#pragma GCC unroll 8
        for (int output = 0; output < R; ++output) {
            const char* place = weight + output * row_bytes + piece * W::BYTES;
            // What comes after this tile: the machine's own look-ahead loses so many short streams.
            for (int line = 0; line < W::BYTES; line += 64) __builtin_prefetch(place + R * row_bytes + line);
            Lanes lower, upper;
            W::widen(place, lower, upper);
#pragma GCC unroll 8
            for (int row = 0; row < T; ++row) {
                total[output][row] += lower * first[row];
                total[output][row] += upper * second[row];
            }
        }
    }
    if (whole * PIECE < size)
#pragma GCC unroll 8
        for (int output = 0; output < R; ++output) {
            char rest[W::BYTES] = {};
            std::memcpy(rest, weight + output * row_bytes + whole * W::BYTES, row_bytes - whole * W::BYTES);
            Lanes lower, upper;
            W::widen(rest, lower, upper);
#pragma GCC unroll 8
            for (int row = 0; row < T; ++row) {
                total[output][row] += lower * load(inputs + row * stride + whole * PIECE);
                total[output][row] += upper * load(inputs + row * stride + whole * PIECE + LANES);
            }
        }
    Lanes many[16] = {};
#pragma GCC unroll 8
    for (int output = 0; output < R; ++output)
#pragma GCC unroll 8
        for (int row = 0; row < T; ++row) many[row * R + output] = total[output][row];
    const Lanes found = sums_of(many);
#pragma GCC unroll 8
    for (int output = 0; output < R; ++output)
#pragma GCC unroll 8
        for (int row = 0; row < T; ++row) {
            const int place = row * R + output;
            sums[row * sums_stride + output] = found[place % 4 * 4 + place / 4];
        }
}

template <typename W, int T>
void outputs_of(const char* weight, const Inputs<W>& inputs, int64_t row, int64_t first, int64_t last, float* sums,
                int64_t sums_stride) {
    constexpr int R = T == 1 ? 8 : T <= 4 ? 4 : 16 / T;  // as many sums as the machine has room for
    const int64_t row_bytes = inputs.size * W::BYTES / PIECE;
    const float* values = inputs.values + row * inputs.stride;
    sums += row * sums_stride;
    int64_t output = first;
    for (; output + R <= last; output += R)
        tile<W, R, T>(weight + output * row_bytes, values, inputs.size, inputs.stride, sums + output, sums_stride);
    for (; output < last; ++output)
        tile<W, 1, T>(weight + output * row_bytes, values, inputs.size, inputs.stride, sums + output, sums_stride);
}

// The sums of outputs [first, last) for all rows, [T, O].
template <typename W>
void multiply(const char* weight, const Inputs<W>& inputs, int64_t num_rows, int64_t first, int64_t last, float* sums,
              int64_t sums_stride) {
    constexpr int64_t TOGETHER = 16;  // outputs whose weights stay near while the rows come by
    constexpr int64_t MOST = 8;       // rows by one reading; of more, equal parts, for a lone row costs most
    for (int64_t start = first; start < last; start += TOGETHER) {
        const int64_t stop = std::min(start + TOGETHER, last);
        const int64_t num_parts = (num_rows + MOST - 1) / MOST;
        for (int64_t part = 0; part < num_parts; ++part) {
            const int64_t row = num_rows * part / num_parts, next = num_rows * (part + 1) / num_parts;
            const auto some = [&]<int T>() { outputs_of<W, T>(weight, inputs, row, start, stop, sums, sums_stride); };
            switch (next - row) {
                case 1: some.template operator()<1>(); break;
                case 2: some.template operator()<2>(); break;
                case 3: some.template operator()<3>(); break;
                case 4: some.template operator()<4>(); break;
                case 5: some.template operator()<5>(); break;
                case 6: some.template operator()<6>(); break;
                case 7: some.template operator()<7>(); break;
                case 8: some.template operator()<8>(); break;
            }
        }
    }
}

enum WeightKind { FLOAT32, BFLOAT16, FLOAT16, FOUR_BIT, EIGHT_BIT };

}  // namespace

extern "C" {

// A weight with what belongs to it; `scale` is that of its sums.
struct Linear {
    const char* weight;
    const void* bias;  // or null
    int64_t num_outputs, num_inputs;
    int64_t kind;
    float scale;
};

struct Heads {
    int64_t num_heads, num_kv_heads, head_dim;
};

struct Layer {
    Linear qkv, output, gate_up, down;
    const void *input_norm, *middle_norm, *query_norm, *key_norm;  // the last two, or null
    float input_eps, middle_eps, query_eps, key_eps;
    Heads heads;
};

// Elements from a row to the next.
struct Strides {
    int64_t queries, keys, values;
};

// Where rows stand: each in one of the sequences, at a position of it. [T], [T], and [B, n] blocks.
struct Places {
    const int64_t *sequences, *positions, *tables;
    int64_t blocks_per_table, block_size;
    int64_t slot(int64_t row, int64_t position) const {
        const int64_t* table = tables + sequences[row] * blocks_per_table;
        return table[position / block_size] * block_size + position % block_size;
    }
};

}  // extern "C"

namespace {

struct Share {
    int64_t first, last;
};

// Of `count` things, those of this thread.
Share share(int64_t count) {
    int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    return {count * thread / threads, count * (thread + 1) / threads};
}

template <typename A> float bias_of(const Linear& linear, int64_t output) {
    return linear.bias ? to_float(static_cast<const A*>(linear.bias)[output]) : 0.0f;
}

typedef std::initializer_list<Share> Shares;

// Some outputs of a product as they are kept; `sums` is scratch and takes them, [T, O].
template <typename A, typename W, typename Fill>
void product_of(const Linear& linear, int64_t num_rows, Shares shares, Fill fill, float* sums) {
    Inputs<W> inputs(num_rows, linear.num_inputs);
    fill(inputs);
    for (Share outputs : shares) {
        multiply<W>(linear.weight, inputs, num_rows, outputs.first, outputs.last, sums, linear.num_outputs);
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t output = outputs.first; output < outputs.last; ++output) {
                float& sum = sums[row * linear.num_outputs + output];
                sum = rounded<A>(sum * linear.scale + bias_of<A>(linear, output));
            }
    }
}

template <typename A, typename Fill>
void product_by_kind(const Linear& linear, int64_t num_rows, Shares shares, Fill fill, float* sums) {
    switch (linear.kind) {
        case FLOAT32: return product_of<A, Float32Weight>(linear, num_rows, shares, fill, sums);
        case BFLOAT16: return product_of<A, Bfloat16Weight>(linear, num_rows, shares, fill, sums);
        case FLOAT16: return product_of<A, Float16Weight>(linear, num_rows, shares, fill, sums);
        case FOUR_BIT: return product_of<A, FourBitWeight>(linear, num_rows, shares, fill, sums);
        case EIGHT_BIT: return product_of<A, EightBitWeight>(linear, num_rows, shares, fill, sums);
    }
}

template <typename A> float inverse_norm(const A* values, int64_t size, float eps) {
    Lanes squares = {};
    float rest = 0;
    int64_t index = 0;
    for (; index + LANES <= size; index += LANES) {
        Lanes lanes;
        for (int lane = 0; lane < LANES; ++lane) lanes[lane] = to_float(values[index + lane]);
        squares += lanes * lanes;
    }
    for (; index < size; ++index) rest += to_float(values[index]) * to_float(values[index]);
    return 1.0f / std::sqrt((sum_of(squares) + rest) / float(size) + eps);
}

// `value` normed: scaled in float32, rounded, then weighted.
template <typename A> float normed(float value, float inverse, A weight) {
    return rounded<A>(rounded<A>(value * inverse) * to_float(weight));
}

// Rows of states, of type B, as the inputs of a product, normed.
template <typename A, typename B> struct Normed {
    const B* states;
    const A* weight;
    int64_t num_rows, size;
    float eps;
    template <typename W> void operator()(Inputs<W>& inputs) const {
        for (int64_t row = 0; row < num_rows; ++row) {
            const B* state = states + row * size;
            float inverse = inverse_norm(state, size, eps);
            for (int64_t index = 0; index < size; ++index)
                inputs.set(row, index, normed<A>(to_float(state[index]), inverse, weight[index]));
        }
    }
};

// Rows as they are.
template <typename B> struct Plain {
    const B* states;
    int64_t num_rows, size;
    template <typename W> void operator()(Inputs<W>& inputs) const {
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t index = 0; index < size; ++index)
                inputs.set(row, index, to_float(states[row * size + index]));
    }
};

template <typename A>
void product(const Linear& linear, const A* states, A* outputs, int64_t num_rows, int64_t num_threads) {
    thread_local std::vector<float> memory;
    memory.resize(num_rows * linear.num_outputs);
    float* sums = memory.data();
#pragma omp parallel num_threads(num_threads)
    {
        Share own = share(linear.num_outputs);
        product_by_kind<A>(linear, num_rows, {own}, Plain<A>{states, num_rows, linear.num_inputs}, sums);
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t output = own.first; output < own.last; ++output)
                outputs[row * linear.num_outputs + output] = from_float<A>(sums[row * linear.num_outputs + output]);
    }
}

// Queries, keys and values of rows: normed, multiplied, the first two turned.
template <typename A>
void before_attention(const Layer& layer, const A* states, const A* cosines, const A* sines, A* heads,
                      int64_t num_rows, int64_t num_threads) {
    const int64_t num_heads = layer.heads.num_heads, num_turned = num_heads + layer.heads.num_kv_heads;
    const int64_t num_all = num_turned + layer.heads.num_kv_heads;
    const int64_t size = layer.heads.head_dim, half = size / 2, num_outputs = layer.qkv.num_outputs;
    thread_local std::vector<float> memory;
    memory.resize(num_rows * num_outputs);
    float* sums = memory.data();
    const Normed<A, A> fill{states, static_cast<const A*>(layer.input_norm), num_rows, layer.qkv.num_inputs,
                            layer.input_eps};
#pragma omp parallel num_threads(num_threads)
    {
        product_by_kind<A>(layer.qkv, num_rows, {share(num_outputs)}, fill, sums);
#pragma omp barrier
        Share own = share(num_rows * num_all);
        for (int64_t place = own.first; place < own.last; ++place) {
            const int64_t row = place / num_all, head = place % num_all;
            float* values = sums + row * num_outputs + head * size;
            A* target = heads + row * num_outputs + head * size;
            if (head >= num_turned) {
                for (int64_t index = 0; index < size; ++index) target[index] = from_float<A>(values[index]);
                continue;
            }
            const bool is_query = head < num_heads;
            const A* weight = static_cast<const A*>(is_query ? layer.query_norm : layer.key_norm);
            if (weight) {
                float inverse = inverse_norm(values, size, is_query ? layer.query_eps : layer.key_eps);
                for (int64_t index = 0; index < size; ++index)
                    values[index] = normed<A>(values[index], inverse, weight[index]);
            }
            const A *cosine = cosines + row * size, *sine = sines + row * size;
            for (int64_t index = 0; index < size; ++index) {
                const float other = values[index < half ? index + half : index - half];
                const float kept = rounded<A>(values[index] * to_float(cosine[index]));
                target[index] = from_float<A>(kept + rounded<A>(other * to_float(sine[index])));
            }
        }
    }
}

// What a layer does after attention: its output product, and the MLP, each added to what came in.
template <typename A>
void after_attention(const Layer& layer, const A* states, const A* attended, A* outputs, int64_t num_rows,
                     int64_t num_threads) {
    const int64_t size = layer.output.num_outputs, between = layer.down.num_inputs;
    thread_local std::vector<float> memory;
    memory.resize(num_rows * (2 * size + 3 * between));
    float* sums = memory.data();                      // [T, D]
    float* middle = sums + num_rows * size;           // [T, D]
    float* gates = middle + num_rows * size;          // [T, 2F]
    float* active = gates + num_rows * 2 * between;   // [T, F]
#pragma omp parallel num_threads(num_threads)
    {
        Share own = share(size);
        product_by_kind<A>(layer.output, num_rows, {own}, Plain<A>{attended, num_rows, layer.output.num_inputs}, sums);
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t index = own.first; index < own.last; ++index) {
                const int64_t place = row * size + index;
                middle[place] = rounded<A>(to_float(states[place]) + sums[place]);
            }
#pragma omp barrier
        const Normed<A, float> fill{middle, static_cast<const A*>(layer.middle_norm), num_rows, size, layer.middle_eps};
        // A gate and its factor by the same thread.
        Share inner = share(between);
        const Share factors{between + inner.first, between + inner.last};
        product_by_kind<A>(layer.gate_up, num_rows, {inner, factors}, fill, gates);
        for (int64_t row = 0; row < num_rows; ++row) {
            const float* gate = gates + row * 2 * between;
            const float* up = gate + between;
            float* target = active + row * between;
            for (int64_t start = inner.first; start < inner.last; start += LANES) {
                const int64_t count = std::min<int64_t>(LANES, inner.last - start);
                Lanes lanes = {};
                std::memcpy(&lanes, gate + start, count * sizeof(float));
                lanes = lanes / (1.0f + exp_of(-lanes));
                for (int64_t lane = 0; lane < count; ++lane)
                    target[start + lane] = rounded<A>(rounded<A>(lanes[lane]) * up[start + lane]);
            }
        }
#pragma omp barrier
        product_by_kind<A>(layer.down, num_rows, {own}, Plain<float>{active, num_rows, between}, sums);
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t index = own.first; index < own.last; ++index) {
                const int64_t place = row * size + index;
                outputs[place] = from_float<A>(middle[place] + sums[place]);
            }
    }
}

inline Lanes load_some(const float* from, __mmask16 which) { return (Lanes)_mm512_maskz_loadu_ps(which, from); }

inline Lanes load_some(const Bfloat16* from, __mmask16 which) {
    return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(which, from)), 16);
}

// One query head over the keys and values that lie `offsets` behind these. PARTS lanes are a head; 0 is any number.
template <typename A, int PARTS>
void attend(const A* query, const A* keys, const A* values, const int64_t* offsets, int64_t num_keys,
            int64_t head_dim, float scaling, A* output) {
    const int64_t num_parts = PARTS ? PARTS : (head_dim + LANES - 1) / LANES;
    const __mmask16 all = 0xffff, rest = !PARTS && head_dim % LANES ? (1 << head_dim % LANES) - 1 : all;
    const auto which = [&](int64_t part) { return PARTS || part + 1 < num_parts ? all : rest; };
    const int64_t num_groups = (num_keys + LANES - 1) / LANES;
    thread_local std::vector<Lanes> memory;
    memory.resize(num_parts + num_groups);
    Lanes *const wide = memory.data(), *const scores = wide + num_parts;
    for (int64_t part = 0; part < num_parts; ++part) wide[part] = load_some(query + part * LANES, which(part));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    Lanes largest = Lanes{} - INFINITY;
    for (int64_t start = 0; start < num_keys; start += LANES) {
        const int64_t count = std::min<int64_t>(LANES, num_keys - start);
        Lanes many[LANES] = {};
        for (int64_t key = 0; key < count; ++key) {
            const A* row = keys + offsets[start + key];
            Lanes total = {};
#pragma GCC unroll 8
            for (int64_t part = 0; part < num_parts; ++part)
                total += load_some(row + part * LANES, which(part)) * wide[part];
            many[key] = total;
        }
        Lanes found = (Lanes)_mm512_permutexvar_ps(order, (__m512)sums_of(many)) * scaling;
        const __mmask16 is_key = (1 << count) - 1;
        found = (Lanes)_mm512_mask_blend_ps(is_key, (__m512)(Lanes{} - INFINITY), (__m512)found);
        scores[start / LANES] = found;
        largest = found > largest ? found : largest;
    }
    const Lanes top = Lanes{} + _mm512_reduce_max_ps((__m512)largest);
    Lanes weights = {};
    for (int64_t group = 0; group < num_groups; ++group) {
        scores[group] = exp_of(scores[group] - top);
        weights += scores[group];
    }
    const float* weight = reinterpret_cast<const float*>(scores);
    const float sum = sum_of(weights);
    constexpr int TOGETHER = 4;
    for (int64_t first = 0; first < num_parts; first += TOGETHER) {
        const int64_t count = std::min<int64_t>(TOGETHER, num_parts - first);
        Lanes total[TOGETHER] = {};
        if (count == TOGETHER) {
            const __mmask16 last = which(first + TOGETHER - 1);
            for (int64_t key = 0; key < num_keys; ++key) {
                const A* row = values + offsets[key] + first * LANES;
                const Lanes share = Lanes{} + weight[key];
#pragma GCC unroll 4
                for (int part = 0; part < TOGETHER; ++part)
                    total[part] += load_some(row + part * LANES, part + 1 < TOGETHER ? all : last) * share;
            }
        } else {
            for (int64_t key = 0; key < num_keys; ++key)
                for (int64_t part = 0; part < count; ++part)
                    total[part] += load_some(values + offsets[key] + (first + part) * LANES, which(first + part)) *
                                   (Lanes{} + weight[key]);
        }
        for (int64_t part = 0; part < count; ++part)
            for (int64_t index = 0; index < LANES && (first + part) * LANES + index < head_dim; ++index)
                output[(first + part) * LANES + index] = from_float<A>(total[part][index] / sum);
    }
}

template <typename A>
void paged_attention(const A* queries, const A* new_keys, const A* new_values, const Strides& strides, A* keys,
                     A* values, const Places& places, const Heads& heads, int64_t window, float scaling, A* outputs,
                     int64_t num_rows, int64_t num_threads) {
    const int64_t num_heads = heads.num_heads, head_dim = heads.head_dim;
    const int64_t stride = heads.num_kv_heads * head_dim, groups = num_heads / heads.num_kv_heads;
#pragma omp parallel num_threads(num_threads)
    {
        Share rows = share(num_rows);
        for (int64_t row = rows.first; row < rows.last; ++row) {
            const int64_t slot = places.slot(row, places.positions[row]);
            std::memcpy(keys + slot * stride, new_keys + row * strides.keys, stride * sizeof(A));
            std::memcpy(values + slot * stride, new_values + row * strides.values, stride * sizeof(A));
        }
#pragma omp barrier
        thread_local std::vector<int64_t> offsets;  // of the keys that a row sees
        Share own = share(num_rows * num_heads);
        for (int64_t place = own.first; place < own.last; ++place) {
            const int64_t row = place / num_heads, head = place % num_heads, offset = head / groups * head_dim;
            if (place == own.first || head == 0) {
                const int64_t last = places.positions[row] + 1;
                const int64_t first = window > 0 ? std::max<int64_t>(0, last - window) : 0;
                offsets.resize(last - first);
                for (int64_t key = first; key < last; ++key) offsets[key - first] = places.slot(row, key) * stride;
            }
            const int64_t parts = head_dim % LANES ? 0 : head_dim / LANES;
            const auto by_size = parts == 4 ? attend<A, 4> : parts == 8 ? attend<A, 8> : attend<A, 0>;
            by_size(queries + row * strides.queries + head * head_dim, keys + offset, values + offset, offsets.data(),
                    offsets.size(), head_dim, scaling, outputs + place * head_dim);
        }
    }
}

}  // namespace

#define FOR_TYPE(A, SUFFIX)                                                                                           \
    void product_##SUFFIX(const Linear* linear, const A* states, A* outputs, int64_t num_rows, int64_t num_threads) { \
        product<A>(*linear, states, outputs, num_rows, num_threads);                                                  \
    }                                                                                                                 \
    void before_attention_##SUFFIX(const Layer* layer, const A* states, const A* cosines, const A* sines, A* heads,   \
                                   int64_t num_rows, int64_t num_threads) {                                           \
        before_attention<A>(*layer, states, cosines, sines, heads, num_rows, num_threads);                            \
    }                                                                                                                 \
    void after_attention_##SUFFIX(const Layer* layer, const A* states, const A* attended, A* outputs,                 \
                                  int64_t num_rows, int64_t num_threads) {                                            \
        after_attention<A>(*layer, states, attended, outputs, num_rows, num_threads);                                 \
    }                                                                                                                 \
    void paged_attention_##SUFFIX(const A* queries, const A* new_keys, const A* new_values, const Strides* strides,   \
                                  A* keys, A* values, const Places* places, const Heads* heads, int64_t window,       \
                                  float scaling, A* outputs, int64_t num_rows, int64_t num_threads) {                 \
        paged_attention<A>(queries, new_keys, new_values, *strides, keys, values, *places, *heads, window, scaling,   \
                           outputs, num_rows, num_threads);                                                           \
    }

extern "C" {
FOR_TYPE(float, float32)
FOR_TYPE(Bfloat16, bfloat16)
}
