/* Sorted tables of ranges. */

#ifndef RANGES_H
#define RANGES_H

#include "card.h"

#include <stdlib.h>
#include <string.h>

struct table {
    struct range *rows;
    size_t count, room;
};

/* The first row that begins after the address. */
static inline size_t first_after(const struct table *table, uint64_t address) {
    size_t low = 0, high = table->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (table->rows[middle].start <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static inline void insert(struct table *table, struct range range) {
    if (table->count == table->room) {
        table->room = 2 * table->room + 256;
        table->rows = realloc(table->rows, table->room * sizeof *table->rows);
    }
    struct range *at = table->rows + first_after(table, range.start);
    memmove(at + 1, at, (size_t)(table->rows + table->count++ - at) * sizeof *at);
    *at = range;
}

static inline void erase(struct table *table, struct range *at) {
    memmove(at, at + 1, (size_t)(table->rows + --table->count - at) * sizeof *at);
}

static inline struct range *next(const struct table *table, struct range *at) {
    return at + 1 < table->rows + table->count ? at + 1 : NULL;
}

/* The range that has the address. */
static inline struct range *find(const struct table *table, uint64_t address) {
    size_t after = first_after(table, address);
    if (after == 0) return NULL;
    struct range *at = table->rows + after - 1;
    return address - at->start < at->size ? at : NULL;
}

/* The first range that has any of the bytes. */
static inline struct range *first_in(const struct table *table, uint64_t address, uint64_t size) {
    struct range *at = find(table, address);
    if (at) return at;
    size_t after = first_after(table, address);
    bool is_inside = after < table->count && table->rows[after].start - address < size;
    return is_inside ? table->rows + after : NULL;
}

/* Whether one range has all bytes. */
static inline bool contains(const struct table *table, uint64_t address, uint64_t size) {
    struct range *at = find(table, address);
    return at && address + size <= at->start + at->size;
}

/* Whether ranges side by side have all bytes. */
static inline bool covers(const struct table *table, uint64_t address, uint64_t size) {
    for (uint64_t end = address + size; address < end;) {
        struct range *at = find(table, address);
        if (!at) return false;
        address = at->start + at->size;
    }
    return true;
}

#endif
