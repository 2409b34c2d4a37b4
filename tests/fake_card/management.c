/* NVIDIA's management library (libnvidia-ml.so.1) with one card. Also compiled without the rest,
 * under another name, for check_bundle.py. */

#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define SUCCESS 0
#define NO_SUCH_INDEX 2 /* NVML_ERROR_INVALID_ARGUMENT */

static int device;

struct memory {
    unsigned long long total, free, used;
};
struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
struct pci {
    char legacy_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
};

#ifdef WITHOUT_CARD
static void card_memory_info(size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = *total_bytes = 143771UL << 20;
}
#else
void card_memory_info(size_t *free_bytes, size_t *total_bytes);
#endif

EXPORT int nvmlInit(void) { return SUCCESS; }
EXPORT int nvmlInit_v2(void) { return SUCCESS; }
EXPORT int nvmlInitWithFlags(unsigned flags) { return (void)flags, SUCCESS; }
EXPORT int nvmlShutdown(void) { return SUCCESS; }
EXPORT const char *nvmlErrorString(int result) {
    return (void)result, CARD_NAME " has no such function";
}

EXPORT int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    snprintf(version, length, "0.0");
    return SUCCESS;
}
EXPORT int nvmlSystemGetCudaDriverVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    return nvmlSystemGetCudaDriverVersion(version);
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 1;
    return SUCCESS;
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = &device;
    return index == 0 ? SUCCESS : NO_SUCH_INDEX;
}
EXPORT int nvmlDeviceGetName(void *handle, char *name, unsigned length) {
    (void)handle;
    snprintf(name, length, "%s", CARD_NAME);
    return SUCCESS;
}
EXPORT int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) {
    (void)handle;
    snprintf(uuid, length, "GPU-00000000-0000-0000-0000-000000000000");
    return SUCCESS;
}
EXPORT int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *pci) {
    (void)handle;
    memset(pci, 0, sizeof *pci);
    pci->bus = 1;
    snprintf(pci->legacy_id, sizeof pci->legacy_id, "0000:01:00.0");
    snprintf(pci->id, sizeof pci->id, "00000000:01:00.0");
    return SUCCESS;
}
EXPORT int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    (void)handle;
    *major = 9;
    *minor = 0;
    return SUCCESS;
}
EXPORT int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
    size_t free_bytes, total_bytes;
    (void)handle;
    card_memory_info(&free_bytes, &total_bytes);
    *memory = (struct memory){total_bytes, free_bytes, total_bytes - free_bytes};
    return SUCCESS;
}
EXPORT int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory) {
    struct memory known;
    nvmlDeviceGetMemoryInfo(handle, &known);
    memory->reserved = 0;
    memory->total = known.total;
    memory->free = known.free;
    memory->used = known.used;
    return SUCCESS;
}
