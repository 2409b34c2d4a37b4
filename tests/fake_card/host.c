/* Host memory that is registered with the card, and copies. */

#define _GNU_SOURCE
#include "card.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ranges.h"

static struct table registered;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Whether the process has all these pages. */
static bool is_there(uint64_t address, size_t size) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), begin = address / page * page;
    for (uint64_t at = begin; at < address + size;) {
        unsigned char known[4096];
        uint64_t length = address + size - at;
        if (length > sizeof known * page) length = sizeof known * page;
        if (mincore((void *)at, length, known) < 0) return false;
        at += length;
    }
    return true;
}

int card_register(uint64_t address, size_t size) {
    int code = OK;
    if (!address || !size) return refuse(INVALID_VALUE, "cuMemHostRegister: no memory");
    pthread_mutex_lock(&lock);
    if (first_in(&registered, address, size)) {
        code = refuse(ALREADY_REGISTERED, "cuMemHostRegister: %zu at %#lx", size, address);
    } else if (!is_there(address, size)) {
        code = refuse(INVALID_VALUE, "cuMemHostRegister: nothing is at %#lx", address);
    } else {
        insert(&registered, (struct range){address, size, 0, true, false});
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int card_unregister(uint64_t address) {
    int code = OK;
    pthread_mutex_lock(&lock);
    struct range *range = find(&registered, address);
    if (!range || range->start != address || range->is_allocation) {
        code = refuse(NOT_REGISTERED, "cuMemHostUnregister: %#lx", address);
    } else {
        erase(&registered, range);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int card_allocate_host(void **address, size_t size) {
    if (!size) {
        *address = NULL;
        return OK;
    }
    void *made = mmap(NULL, size, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    insert(&registered, (struct range){(uint64_t)made, size, 0, true, true});
    pthread_mutex_unlock(&lock);
    *address = made;
    return OK;
}

int card_free_host(void *address) {
    int code = OK;
    if (!address) return OK;
    pthread_mutex_lock(&lock);
    struct range *range = find(&registered, (uint64_t)address);
    if (!range || range->start != (uint64_t)address || !range->is_allocation) {
        code = refuse(INVALID_VALUE, "cuMemFreeHost: %p was not allocated", address);
    } else {
        munmap(address, range->size);
        erase(&registered, range);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int card_is_pinned(uint64_t address, size_t size) {
    pthread_mutex_lock(&lock);
    int answer = first_in(&registered, address, size) ? -1 : 0;
    if (contains(&registered, address, size)) answer = 1;
    pthread_mutex_unlock(&lock);
    return answer;
}

/* One side of a copy: the device's where it has to be, and not over the end of anything. */
static int check_side(uint64_t address, size_t size, bool is_device) {
    int on_device = card_is_device(address, size);
    if (on_device < 0) {
        return refuse(INVALID_VALUE, "copy: %zu at %#lx are not all mapped", size, address);
    }
    if (is_device && !on_device) {
        return refuse(INVALID_VALUE, "copy: %#lx is not the device's", address);
    }
    if (!on_device && card_is_pinned(address, size) < 0) {
        return refuse(INVALID_VALUE, "copy: %zu at %#lx cross a registration", size, address);
    }
    return OK;
}

int card_copy(uint64_t target, uint64_t source, size_t size, enum direction direction) {
    if (size == 0) return OK;
    int code = check_side(target, size, direction == TO_DEVICE);
    if (code == OK) code = check_side(source, size, direction == TO_HOST);
    if (code == OK) memmove((void *)target, (void *)source, size);
    return code;
}

int card_fill(uint64_t target, uint32_t value, size_t width, size_t count) {
    int code = count ? check_side(target, width * count, true) : OK;
    if (code) return code;
    if (width == 1) memset((void *)target, (int)value, count);
    for (size_t i = 0; width == 2 && i < count; i++) ((uint16_t *)target)[i] = (uint16_t)value;
    for (size_t i = 0; width == 4 && i < count; i++) ((uint32_t *)target)[i] = value;
    return OK;
}
