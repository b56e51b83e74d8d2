// A product with a weight of any kind, its outputs shared by threads.

#pragma once

#include <initializer_list>
#include <vector>

#include <omp.h>

#include "tiles.hpp"

enum WeightKind { FLOAT32, FLOAT16, BFLOAT16, FOUR_BIT, EIGHT_BIT, BFLOAT16_TILES, FOUR_BIT_TILES, EIGHT_BIT_TILES };

extern "C" {

// A weight with what belongs to it; `scale` is that of its sums.
struct Linear {
    const char* weight;
    const void* bias;  // or null
    int64_t num_outputs, num_inputs;
    int64_t kind;
    float scale;
};

}  // extern "C"

namespace {

struct Share {
    int64_t first, last;
};

// Of `count` things, those of this thread; whole groups of them.
Share share(int64_t count, int64_t group = 1) {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num(), groups = (count + group - 1) / group;
    return {groups * thread / threads * group, std::min(count, groups * (thread + 1) / threads * group)};
}

// Of the outputs of a product, those of this thread.
Share share_of_outputs(int64_t count) { return share(count, LANES); }

typedef std::initializer_list<Share> Shares;

// Rows as they are, of type B: side by side, or each in its place.
template <typename B> struct Plain {
    const B* states;
    int64_t size;
    const int64_t* places = nullptr;
    Lanes at(int64_t row, int64_t first, __mmask16 which) const {
        return load_some(states + (places ? places[row] : row) * size + first, which);
    }
};

template <typename A> float inverse_norm(const A* values, int64_t size, float eps) {
    Lanes squares = {};
    for (int64_t first = 0; first < size; first += LANES) {
        const Lanes lanes = load_some(values + first, first_lanes(size - first));
        squares += lanes * lanes;
    }
    return 1.0f / std::sqrt(sum_of(squares) / float(size) + eps);
}

// Values normed: scaled in float32, rounded, then weighted.
template <typename A> Lanes normed(Lanes values, float inverse, Lanes weight) {
    return rounded<A>(rounded<A>(values * inverse) * weight);
}

// Rows of states of type B, normed by weights of type A.
template <typename A, typename B> class Normed {
  public:
    Normed(const B* states, const void* weight, int64_t num_rows, int64_t size, float eps)
        : states(states), weight(static_cast<const A*>(weight)), size(size) {
        thread_local std::vector<float> memory;
        float* found = room_in(memory, num_rows);
        for (int64_t row = 0; row < num_rows; ++row) found[row] = inverse_norm(states + row * size, size, eps);
        inverses = found;
    }
    Lanes at(int64_t row, int64_t first, __mmask16 which) const {
        const Lanes values = load_some(states + row * size + first, which);
        return normed<A>(values, inverses[row], load_some(weight + first, which));
    }

  private:
    const B* states;
    const A* weight;
    const float* inverses;
    int64_t size;
};

// For what is a type alone.
template <typename P> struct Type {
    typedef P Product;
};

// Calls `use` with the way to compute a product with states of type A.
template <typename A, typename Use> auto by_kind(int64_t kind, Use use) {
    switch (kind) {
#ifdef HAS_TILES
        case FOUR_BIT_TILES: return use(Type<BlockTileProduct<FourBitTiles>>());
        case EIGHT_BIT_TILES: return use(Type<BlockTileProduct<EightBitTiles>>());
        case BFLOAT16_TILES: return use(Type<RowTileProduct<A>>());
#endif
        case BFLOAT16: return use(Type<LaneProduct<Bfloat16Weight>>());
        case FLOAT16: return use(Type<LaneProduct<Float16Weight>>());
        case FOUR_BIT: return use(Type<LaneProduct<FourBitWeight>>());
        case EIGHT_BIT: return use(Type<LaneProduct<EightBitWeight>>());
        default: return use(Type<LaneProduct<Float32Weight>>());
    }
}

// Room that the inputs of a product take, which threads share.
template <typename A> int64_t room_for(const Linear& linear, int64_t num_rows) {
    return by_kind<A>(linear.kind, [&](auto type) {
        return decltype(type)::Product::room(num_rows, linear.num_inputs);
    });
}

// Some outputs of a product as they are kept; `sums` is scratch and takes them, [T, O]. All threads take part.
template <typename A, typename Source>
void multiply(const Linear& linear, const Source& source, int64_t num_rows, Shares shares, Lanes* room, float* sums) {
    by_kind<A>(linear.kind, [&](auto type) {
        typename decltype(type)::Product product(room, num_rows, linear.num_inputs);
        const Share pieces = share(num_pieces(linear.num_inputs));
        for (int64_t piece = pieces.first; piece < pieces.last; ++piece) {
            const int64_t first = piece * PIECE, left = linear.num_inputs - first;
            const __mmask16 lower = first_lanes(left), upper = first_lanes(left - LANES);
            product.clear(piece);
            for (int64_t row = 0; row < num_rows; ++row)
                product.put(row, piece, source.at(row, first, lower), source.at(row, first + LANES, upper));
        }
#pragma omp barrier
        for (Share outputs : shares)
            product.multiply(linear.weight, outputs.first, outputs.last, sums, linear.num_outputs);
        return 0;
    });
    for (Share outputs : shares)
        for (int64_t first = outputs.first; first < outputs.last; first += LANES) {
            const __mmask16 which = first_lanes(outputs.last - first);
            const Lanes bias = linear.bias ? load_some(static_cast<const A*>(linear.bias) + first, which) : Lanes{};
            for (int64_t row = 0; row < num_rows; ++row) {
                float* place = sums + row * linear.num_outputs + first;
                store_some(place, which, rounded<A>(load_some(place, which) * linear.scale + bias));
            }
        }
}

// `states @ weight.T * scale + bias`, [T, O].
template <typename A>
void product(const Linear& linear, const Plain<A>& source, A* outputs, int64_t num_rows, int64_t num_threads) {
    thread_local std::vector<float> memory;
    thread_local std::vector<Lanes> lanes;
    float* sums = room_in(memory, num_rows * linear.num_outputs);
    Lanes* room = room_in(lanes, room_for<A>(linear, num_rows));
#pragma omp parallel num_threads(num_threads)
    {
        const Share own = share_of_outputs(linear.num_outputs);
        multiply<A>(linear, source, num_rows, {own}, room, sums);
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t first = own.first; first < own.last; first += LANES) {
                const int64_t place = row * linear.num_outputs + first;
                const __mmask16 which = first_lanes(own.last - first);
                store_some(outputs + place, which, load_some(sums + place, which));
            }
    }
}

}  // namespace
