// Both halves of a decoder layer of the Llama family: all before attention, and all behind it.

#pragma once

#include "attention.hpp"

extern "C" {

struct Layer {
    Linear qkv, output, gate_up, down;
    const void *input_norm, *middle_norm, *query_norm, *key_norm;  // the last two, or null
    float input_eps, middle_eps, query_eps, key_eps;
    Heads heads;
    int64_t window;  // or 0
    float scaling;
};

// By how much positions turn queries and keys: [N, Dh] each, of the sines the first half negated.
struct Rotary {
    const void *cosines, *sines;
    const int64_t* places;  // [T], of rows; or null where they stand one behind the other
};

// An RMS norm of rows; no weight is no norm.
struct Norm {
    const void* weight;
    float eps;
};

// Rows of states in a table of them, [N, D].
struct StateRows {
    void* table;            // or null: nowhere
    const int64_t* places;  // [T]; or null where they are the table
    int64_t size;           // N
};

// What a run of layers begins with: rows, or what a product makes of them with others, normed, at their side.
struct Source {
    StateRows states;
    const Linear* fuse;  // [D, 2D], or null
    StateRows context;
    float eps;
};

// Where a run of layers keeps keys and values: the pools of each layer, [N * S, K, Dh], and blocks of them that are to
// be cleared.
struct Pages {
    void *const *keys, *const *values;
    const int64_t* new_blocks;  // their number, and they; or null
    Places places;
};

}  // extern "C"

namespace {

// Whether there is a place in the table for each row.
inline bool are_there(const StateRows& rows, int64_t num_rows) {
    if (!rows.table) return true;
    if (!rows.places) return num_rows <= rows.size;
    return std::all_of(rows.places, rows.places + num_rows, [&](int64_t at) { return 0 <= at && at < rows.size; });
}

// Layers over some rows. All threads take part in what it does.
template <typename A> class LayerPass {
  public:
    // Room for these layers, of the thread that makes it.
    LayerPass(const Layer* const* layers, int64_t num_layers, int64_t num_rows, const Linear* fuse = nullptr)
        : num_rows(num_rows) {
        int64_t num_sums = 0, num_lanes = 0, num_heads = 0, num_attended = 0;
        for (int64_t index = 0; index < num_layers; ++index) {
            const Layer& layer = *layers[index];
            const int64_t behind = 2 * layer.output.num_outputs + 3 * layer.down.num_inputs;
            num_sums = std::max({num_sums, num_rows * behind, num_rows * layer.qkv.num_outputs});
            for (const Linear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
                num_lanes = std::max(num_lanes, room_for<A>(*linear, num_rows));
            num_heads = std::max(num_heads, num_rows * layer.qkv.num_outputs);
            num_attended = std::max(num_attended, num_rows * layer.output.num_inputs);
        }
        const int64_t num_joined = fuse ? num_rows * fuse->num_inputs : 0;
        if (fuse) {
            num_sums = std::max(num_sums, num_rows * fuse->num_outputs);
            num_lanes = std::max(num_lanes, room_for<A>(*fuse, num_rows));
        }
        thread_local std::vector<float> floats;
        thread_local std::vector<Lanes> lanes;
        thread_local std::vector<A> values;
        sums = room_in(floats, num_sums);
        room = room_in(lanes, num_lanes);
        heads = room_in(values, num_heads + num_attended + num_joined);
        attended = heads + num_heads;
        joined = attended + num_attended;
    }

    // What the first layer takes.
    void begin(const Source& source, int64_t size, A* states) const {
        const Share own = share(num_rows);
        for (int64_t row = own.first; row < own.last; ++row) {
            A* target = source.fuse ? joined + row * 2 * size : states + row * size;
            std::memcpy(target, row_of(source.states, row, size), size * sizeof(A));
            if (source.fuse) put_normed(row_of(source.context, row, size), source.eps, nullptr, size, target + size);
        }
#pragma omp barrier
        if (!source.fuse) return;
        const Share outputs = share_of_outputs(size);
        multiply<A>(*source.fuse, Plain<A>{joined, 2 * size}, num_rows, {outputs}, room, sums);
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t first = outputs.first; first < outputs.last; first += LANES) {
                const __mmask16 which = first_lanes(outputs.last - first);
                store_some(states + row * size + first, which, load_some(sums + row * size + first, which));
            }
#pragma omp barrier
    }

    // Queries, keys and values of rows: normed, multiplied, the first two turned.
    void before_attention(const Layer& layer, const A* states, const Rotary& rotary, A* heads) const {
        const int64_t num_heads = layer.heads.num_heads, num_turned = num_heads + layer.heads.num_kv_heads;
        const int64_t num_all = num_turned + layer.heads.num_kv_heads;
        const int64_t size = layer.heads.head_dim, half = size / 2, num_outputs = layer.qkv.num_outputs;
        const Normed<A, A> rows(states, layer.input_norm, num_rows, layer.qkv.num_inputs, layer.input_eps);
        multiply<A>(layer.qkv, rows, num_rows, {share_of_outputs(num_outputs)}, room, sums);
#pragma omp barrier
        const Share own = share(num_rows * num_all);
        for (int64_t place = own.first; place < own.last; ++place) {
            const int64_t row = place / num_all, head = place % num_all;
            float* values = sums + row * num_outputs + head * size;
            A* target = heads + row * num_outputs + head * size;
            const bool is_query = head < num_heads;
            const A* weight = static_cast<const A*>(is_query ? layer.query_norm : layer.key_norm);
            if (head < num_turned && weight)
                put_normed(values, is_query ? layer.query_eps : layer.key_eps, weight, size, values);
            if (head >= num_turned) {
                for (int64_t first = 0; first < size; first += LANES) {
                    const __mmask16 which = first_lanes(size - first);
                    store_some(target + first, which, load_some(values + first, which));
                }
                continue;
            }
            const int64_t turned_by = (rotary.places ? rotary.places[row] : row) * size;
            const A* cosine = static_cast<const A*>(rotary.cosines) + turned_by;
            const A* sine = static_cast<const A*>(rotary.sines) + turned_by;
            for (int64_t start : {int64_t(0), half})
                for (int64_t first = 0; first < half; first += LANES) {
                    const __mmask16 which = first_lanes(half - first);
                    const Lanes own_half = load_some(values + start + first, which);
                    const Lanes other = load_some(values + (half - start) + first, which);
                    const Lanes kept = rounded<A>(own_half * load_some(cosine + start + first, which));
                    const Lanes turned = rounded<A>(other * load_some(sine + start + first, which));
                    store_some(target + start + first, which, kept + turned);
                }
        }
    }

    // The output product, and the MLP, each added to what came in; `outputs` may be the states.
    void after_attention(const Layer& layer, const A* states, const A* attended, A* outputs) const {
        const int64_t size = layer.output.num_outputs, between = layer.down.num_inputs;
        float* middle = sums + num_rows * size;          // [T, D]
        float* gates = middle + num_rows * size;         // [T, 2F]
        float* active = gates + num_rows * 2 * between;  // [T, F]
        const Share own = share_of_outputs(size);
        const auto of_own = [&](auto use) {
            for (int64_t row = 0; row < num_rows; ++row)
                for (int64_t first = own.first; first < own.last; first += LANES)
                    use(row * size + first, first_lanes(own.last - first));
        };
        multiply<A>(layer.output, Plain<A>{attended, layer.output.num_inputs}, num_rows, {own}, room, sums);
        of_own([&](int64_t place, __mmask16 which) {
            const Lanes sum = load_some(states + place, which) + load_some(sums + place, which);
            store_some(middle + place, which, rounded<A>(sum));
        });
#pragma omp barrier
        // A gate and its factor by the same thread.
        const Share inner = share_of_outputs(between), factors{between + inner.first, between + inner.last};
        const Normed<A, float> rows(middle, layer.middle_norm, num_rows, size, layer.middle_eps);
        multiply<A>(layer.gate_up, rows, num_rows, {inner, factors}, room, gates);
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t first = inner.first; first < inner.last; first += LANES) {
                const __mmask16 which = first_lanes(inner.last - first);
                const float* gate = gates + row * 2 * between + first;
                const Lanes lanes = load_some(gate, which);
                const Lanes opened = rounded<A>(lanes / (1.0f + exp_of(-lanes)));
                const Lanes factor = load_some(gate + between, which);
                store_some(active + row * between + first, which, rounded<A>(opened * factor));
            }
#pragma omp barrier
        multiply<A>(layer.down, Plain<float>{active, between}, num_rows, {own}, room, sums);
        of_own([&](int64_t place, __mmask16 which) {
            store_some(outputs + place, which, load_some(middle + place, which) + load_some(sums + place, which));
        });
#pragma omp barrier
    }

    // A whole layer, in place; `index` is that of its keys and values. Where these are all that is wanted, no more.
    void run(const Layer& layer, const Pages& pages, int64_t index, const Rotary& rotary, bool keeps_only,
             A* states) const {
        A *const keys = static_cast<A*>(pages.keys[index]), *const values = static_cast<A*>(pages.values[index]);
        const int64_t stride = layer.heads.num_kv_heads * layer.heads.head_dim;
        const int64_t block = pages.places.block_size * stride;
        const Share fresh = share(pages.new_blocks ? pages.new_blocks[0] : 0);
        for (int64_t number = fresh.first; number < fresh.last; ++number)
            for (A* pool : {keys, values}) std::memset(pool + pages.new_blocks[1 + number] * block, 0, block * sizeof(A));
        before_attention(layer, states, rotary, heads);
#pragma omp barrier
        const int64_t row_size = layer.qkv.num_outputs;
        const A* new_keys = heads + layer.heads.num_heads * layer.heads.head_dim;
        const Strides strides{row_size, row_size, row_size};
        if (keeps_only) {
            keep_rows(new_keys, new_keys + stride, strides, keys, values, pages.places, layer.heads, num_rows);
            return;
        }
        attend_rows<A>(heads, new_keys, new_keys + stride, strides, keys, values, pages.places, layer.heads,
                       layer.window, layer.scaling, attended, num_rows);
#pragma omp barrier
        after_attention(layer, states, attended, states);
    }

    // Behind the last layer: the norm, in place, and a copy of what it gives.
    void finish(const Norm& norm, const StateRows& keep, int64_t size, A* states) const {
        const Share own = share(num_rows);
        for (int64_t row = own.first; row < own.last; ++row) {
            A* values = states + row * size;
            if (norm.weight) put_normed(values, norm.eps, static_cast<const A*>(norm.weight), size, values);
            if (keep.table) std::memcpy(row_of(keep, row, size), values, size * sizeof(A));
        }
    }

  private:
    static A* row_of(const StateRows& rows, int64_t row, int64_t size) {
        return static_cast<A*>(rows.table) + (rows.places ? rows.places[row] : row) * size;
    }

    template <typename B> static void put_normed(const B* values, float eps, const A* weight, int64_t size, B* target) {
        const float inverse = inverse_norm(values, size, eps);
        for (int64_t first = 0; first < size; first += LANES) {
            const __mmask16 which = first_lanes(size - first);
            const Lanes lanes = load_some(values + first, which);
            const Lanes by = weight ? load_some(weight + first, which) : Lanes{} + 1.0f;
            store_some(target + first, which, normed<A>(lanes, inverse, by));
        }
    }

    int64_t num_rows;
    float* sums;
    Lanes* room;
    A *heads, *attended, *joined;  // [T, outputs of a QKV product], [T, H, Dh], [T, 2D]
};

}  // namespace
