/* libcuda.so.1 and libnvidia-ml.so.1 for a machine without a GPU, see check_bundle.py.
 *
 * The driver has no device: every call says so. The management library shows one H200, so that
 * vLLM chooses as it would on that one. STUB_CALLS is defined by the script: one STUB(name) for
 * each function of the driver that the bundle's libraries link to.
 */

#include <string.h>

#ifdef STUB_CALLS
#define NO_DEVICE 100 /* CUDA_ERROR_NO_DEVICE */
#define STUB(name) \
    int name(void) { return NO_DEVICE; }
STUB_CALLS
#else
#define SUCCESS 0
static int device;

struct memory {
    unsigned long long total, free, used;
};

int nvmlInit(void) { return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int result) { return "the stub has no such function"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 1;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = &device;
    return index == 0 ? SUCCESS : 2; /* NVML_ERROR_INVALID_ARGUMENT */
}

int nvmlDeviceGetName(void *handle, char *name, unsigned length) {
    strncpy(name, "NVIDIA H200", length);
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) {
    strncpy(uuid, "GPU-00000000-0000-0000-0000-000000000000", length);
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    *major = 9;
    *minor = 0;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *handle, struct memory *memory) {
    memory->total = memory->free = 143771ULL << 20;
    memory->used = 0;
    return SUCCESS;
}
#endif
