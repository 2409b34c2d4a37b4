/* The device's memory: cuMemCreate, cuMemMap and what goes with them; plain allocations.
 *
 * Physical memory is a memfd, of which only what is written takes room on the host. A mapping is
 * an mmap of it, a reservation addresses that nobody may touch, so that whoever forgets a call
 * gets an error here or a segmentation fault, as on a card.
 */

#define _GNU_SOURCE
#include "card.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ranges.h"

#define GRANULARITY (2 * MIB)
#define DEFAULT_BYTES (143771 * MIB) /* of an H200 */
#define CONTEXT_BYTES (500 * MIB)
#define FILE_BYTES (1UL << 46)
#define MAX_PROCESSES 64
#define FIRST_HANDLE 0x1000

struct memory {
    uint64_t offset, size;
    uint32_t uses; /* by its owner, and by mappings */
    bool is_owned; /* until cuMemRelease */
};

/* What each process has of the card, in a file that they share. A process that has a slot holds a
 * lock on its byte: it goes with the process, however that ends. */
static uint64_t used_alone, *own = &used_alone, *slots;
static int slots_file = -1, own_slot = -1;
static int file = -1;
static uint64_t file_end, total_bytes;
static struct memory *memories;
static uint32_t num_memories, room_for_memories;
static struct table reservations, mappings;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool is_aligned(uint64_t value) { return value % GRANULARITY == 0; }

static struct flock byte_of(int index) {
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = index, .l_len = 1};
}

/* Whatever can be known without cuInit; a forked child goes on with it. */
static void attach(void) {
    if (total_bytes) return;
    const char *path = getenv("FAKE_CARD_STATE"), *size = getenv("FAKE_CARD_BYTES");
    total_bytes = size ? strtoull(size, NULL, 10) : DEFAULT_BYTES;
    slots_file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (slots_file < 0) return;
    void *shared = mmap(NULL, MAX_PROCESSES * sizeof *slots, PROT_READ | PROT_WRITE, MAP_SHARED,
                        slots_file, 0);
    if (shared != MAP_FAILED) slots = shared;
}

static int take_slot(void) {
    for (int index = 0; slots && index < MAX_PROCESSES; index++) {
        struct flock byte = byte_of(index);
        if (fcntl(slots_file, F_SETLK, &byte) < 0) continue;
        own_slot = index;
        own = &slots[index];
        *own = 0;
        return OK;
    }
    return slots ? refuse(OUT_OF_MEMORY, "cuInit: more than %d processes", MAX_PROCESSES) : OK;
}

int card_init_memory(void) {
    attach();
    file = memfd_create("fake-card", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, FILE_BYTES) < 0) {
        return refuse(OUT_OF_MEMORY, "cuInit: no memfd: %s", strerror(errno));
    }
    return take_slot();
}

static uint64_t used_bytes(void) {
    uint64_t used = *own;
    for (int index = 0; slots && index < MAX_PROCESSES; index++) {
        struct flock byte = byte_of(index);
        if (index == own_slot || slots[index] == 0) continue;
        if (fcntl(slots_file, F_GETLK, &byte) == 0 && byte.l_type != F_UNLCK) used += slots[index];
    }
    return used;
}

void card_take_context_bytes(void) {
    pthread_mutex_lock(&lock);
    *own += CONTEXT_BYTES;
    pthread_mutex_unlock(&lock);
}

void card_memory_info(size_t *free_bytes, size_t *total) {
    pthread_mutex_lock(&lock);
    attach();
    uint64_t used = used_bytes();
    *total = total_bytes;
    *free_bytes = used < total_bytes ? total_bytes - used : 0;
    pthread_mutex_unlock(&lock);
}

/* From here to card_allocate: with the lock. */

static struct memory *memory_of(uint64_t handle) {
    uint64_t index = handle - FIRST_HANDLE;
    return index < num_memories && memories[index].uses ? &memories[index] : NULL;
}

static int create(uint64_t *handle, size_t size) {
    if (used_bytes() + size > total_bytes) return OUT_OF_MEMORY;
    if (num_memories == room_for_memories) {
        room_for_memories = 2 * room_for_memories + 1024;
        memories = realloc(memories, room_for_memories * sizeof *memories);
    }
    memories[num_memories] = (struct memory){file_end, size, 1, true};
    *handle = FIRST_HANDLE + num_memories++;
    file_end += size;
    *own += size;
    return OK;
}

static void drop_use(struct memory *memory) {
    if (--memory->uses) return;
    fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, memory->offset, memory->size);
    *own -= memory->size;
}

static int reserve(uint64_t *address, size_t size, uint64_t alignment, bool is_allocation) {
    char *place = mmap(NULL, size + alignment, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return refuse(OUT_OF_MEMORY, "no %zu addresses", size);
    *address = ((uint64_t)place + alignment - 1) / alignment * alignment;
    uint64_t before = *address - (uint64_t)place;
    if (before) munmap(place, before);
    munmap((char *)*address + size, alignment - before);
    insert(&reservations, (struct range){*address, size, 0, false, is_allocation});
    return OK;
}

static void unreserve(struct range *reservation) {
    munmap((void *)reservation->start, reservation->size);
    erase(&reservations, reservation);
}

static int map(uint64_t address, size_t size, struct memory *memory) {
    void *place = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, file,
                       (off_t)memory->offset);
    if (place == MAP_FAILED) return refuse(OUT_OF_MEMORY, "cuMemMap: %s", strerror(errno));
    memory->uses++;
    insert(&mappings, (struct range){address, size, (uint32_t)(memory - memories), false, false});
    return OK;
}

static void allow(uint64_t address, size_t size, int protection) {
    mprotect((void *)address, size, protection);
    for (struct range *at = find(&mappings, address); at && at->start < address + size;
         at = next(&mappings, at)) {
        at->is_accessible = protection != PROT_NONE;
    }
}

static void unmap(uint64_t address, size_t size) {
    mmap((void *)address, size, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    for (struct range *at; (at = first_in(&mappings, address, size));) {
        drop_use(&memories[at->memory]);
        erase(&mappings, at);
    }
}

static int release(uint64_t handle) {
    struct memory *memory = memory_of(handle);
    if (!memory || !memory->is_owned) {
        return refuse(INVALID_VALUE, "cuMemRelease: no memory %#lx", handle);
    }
    memory->is_owned = false;
    drop_use(memory);
    return OK;
}

int card_allocate(uint64_t *address, size_t size) {
    uint64_t handle, rounded = (size + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    if (size == 0) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    int code = create(&handle, rounded);
    if (code == OK) {
        code = reserve(address, rounded, GRANULARITY, true);
        if (code == OK) code = map(*address, rounded, memory_of(handle));
        if (code == OK) allow(*address, rounded, PROT_READ | PROT_WRITE);
        release(handle);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int card_free(uint64_t address) {
    int code = OK;
    pthread_mutex_lock(&lock);
    struct range *reservation = find(&reservations, address);
    if (!reservation || reservation->start != address || !reservation->is_allocation) {
        code = refuse(INVALID_VALUE, "cuMemFree: %#lx was not allocated", address);
    } else {
        unmap(address, reservation->size);
        unreserve(reservation);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

int card_is_device(uint64_t address, size_t size) {
    pthread_mutex_lock(&lock);
    int answer = first_in(&reservations, address, size) ? -1 : 0;
    if (answer && covers(&mappings, address, size)) {
        answer = 1;
        for (struct range *at = find(&mappings, address); at && at->start < address + size;
             at = next(&mappings, at)) {
            if (!at->is_accessible) answer = -1;
        }
    }
    pthread_mutex_unlock(&lock);
    return answer;
}

/* Of the driver's API. */

struct location {
    int type, id;
};
struct allocation {
    int type, handle_types;
    struct location location; /* more follows */
};
struct access {
    struct location location;
    int flags;
};

static bool is_card(const struct location *location) {
    return location->type == 1 && location->id == 0;
}

EXPORT int cuMemGetAllocationGranularity(size_t *size, const struct allocation *wanted, int option) {
    (void)option;
    if (!is_card(&wanted->location)) return refuse(INVALID_DEVICE, "granularity of no card");
    *size = GRANULARITY;
    return check_process();
}

EXPORT int cuMemCreate(uint64_t *handle, size_t size, const struct allocation *wanted,
                       unsigned long long flags) {
    int code = check_process();
    if (code) return code;
    if (!size || !is_aligned(size) || wanted->type != 1 || flags) {
        return refuse(INVALID_VALUE, "cuMemCreate: %zu bytes of type %d", size, wanted->type);
    }
    if (!is_card(&wanted->location)) return refuse(INVALID_DEVICE, "cuMemCreate: no such device");
    pthread_mutex_lock(&lock);
    code = create(handle, size);
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT int cuMemRelease(uint64_t handle) {
    int code = check_process();
    if (code) return code;
    pthread_mutex_lock(&lock);
    code = release(handle);
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT int cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t wanted,
                               unsigned long long flags) {
    int code = check_process();
    if (code) return code;
    if (!size || !is_aligned(size) || flags || (alignment & (alignment - 1)) || wanted % 4096) {
        return refuse(INVALID_VALUE, "cuMemAddressReserve: %zu at %zu", size, alignment);
    }
    pthread_mutex_lock(&lock);
    code = reserve(address, size, alignment > GRANULARITY ? alignment : GRANULARITY, false);
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT int cuMemAddressFree(uint64_t address, size_t size) {
    int code = check_process();
    if (code) return code;
    pthread_mutex_lock(&lock);
    struct range *reservation = find(&reservations, address);
    if (!reservation || reservation->start != address || reservation->size != size ||
        reservation->is_allocation) {
        code = refuse(INVALID_VALUE, "cuMemAddressFree: %zu at %#lx not reserved", size, address);
    } else if (first_in(&mappings, address, size)) {
        code = refuse(INVALID_VALUE, "cuMemAddressFree: %#lx is still mapped", address);
    } else {
        unreserve(reservation);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle,
                    unsigned long long flags) {
    int code = check_process();
    if (code) return code;
    pthread_mutex_lock(&lock);
    struct memory *memory = memory_of(handle);
    if (!memory || !memory->is_owned) {
        code = refuse(INVALID_VALUE, "cuMemMap: no memory %#lx", handle);
    } else if (!size || !is_aligned(address) || !is_aligned(size) || offset || flags ||
               size > memory->size) {
        code = refuse(INVALID_VALUE, "cuMemMap: %zu bytes from %zu at %#lx", size, offset, address);
    } else if (!contains(&reservations, address, size)) {
        code = refuse(INVALID_VALUE, "cuMemMap: %zu at %#lx are not reserved", size, address);
    } else if (first_in(&mappings, address, size)) {
        code = refuse(INVALID_VALUE, "cuMemMap: %zu at %#lx are mapped already", size, address);
    } else {
        code = map(address, size, memory);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT int cuMemSetAccess(uint64_t address, size_t size, const struct access *access, size_t count) {
    int code = check_process();
    if (code) return code;
    if (count != 1 || !is_card(&access->location)) {
        return refuse(INVALID_DEVICE, "cuMemSetAccess: for another device");
    }
    static const int protections[] = {PROT_NONE, PROT_READ, -1, PROT_READ | PROT_WRITE};
    if (access->flags < 0 || access->flags > 3 || protections[access->flags] < 0) {
        return refuse(INVALID_VALUE, "cuMemSetAccess: flags %d", access->flags);
    }
    pthread_mutex_lock(&lock);
    if (!size || !covers(&mappings, address, size)) {
        code = refuse(INVALID_VALUE, "cuMemSetAccess: %zu at %#lx are not mapped", size, address);
    } else {
        allow(address, size, protections[access->flags]);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT int cuMemUnmap(uint64_t address, size_t size) {
    int code = check_process();
    if (code) return code;
    pthread_mutex_lock(&lock);
    struct range *last = find(&mappings, address + size - 1);
    if (!size || !covers(&mappings, address, size) || find(&mappings, address)->start != address ||
        last->start + last->size != address + size) {
        code = refuse(INVALID_VALUE, "cuMemUnmap: %zu at %#lx are no mappings", size, address);
    } else {
        unmap(address, size);
    }
    pthread_mutex_unlock(&lock);
    return code;
}
