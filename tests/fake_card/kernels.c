/* The driver's modules and kernels, which do nothing. */

#include "card.h"

#include <stdlib.h>

static int load(void **module) {
    int code = begin_unsafe("loading a module");
    *module = code ? NULL : calloc(1, 64);
    return code;
}

EXPORT int cuModuleLoad(void **module, const char *path) {
    (void)path;
    return load(module);
}
EXPORT int cuModuleLoadData(void **module, const void *image) {
    (void)image;
    return load(module);
}
EXPORT int cuModuleLoadDataEx(void **module, const void *image) {
    (void)image;
    return load(module);
}
EXPORT int cuModuleUnload(void *module) {
    free(module);
    return OK;
}
EXPORT int cuModuleGetFunction(void **function, void *module, const char *name) {
    (void)name;
    *function = module;
    return OK;
}
EXPORT int cuFuncGetAttribute(int *value, int attribute, void *function) {
    (void)function;
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; /* threads, registers */
    return OK;
}
EXPORT int cuFuncSetAttribute(void) { return OK; }
EXPORT int cuFuncSetCacheConfig(void) { return OK; }
EXPORT int cuOccupancyMaxActiveClusters(int *count) {
    *count = 1;
    return OK;
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count) {
    *count = 2;
    return OK;
}
EXPORT int cuTensorMapEncodeTiled(void) { return OK; }
EXPORT int cuTensorMapEncodeIm2col(void) { return OK; }

static int launch(void *stream) {
    bool is_captured;
    return begin_work(stream, &is_captured);
}

EXPORT int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned width,
                          unsigned height, unsigned depth, unsigned shared, void *stream) {
    (void)function;
    (void)shared;
    if (!x || !y || !z || !width || !height || !depth) return refuse(INVALID_VALUE, "empty launch");
    return launch(stream);
}

struct launch_config {
    unsigned grid[3], block[3], shared;
    void *stream; /* more follows */
};
EXPORT int cuLaunchKernelEx(const struct launch_config *config) { return launch(config->stream); }
