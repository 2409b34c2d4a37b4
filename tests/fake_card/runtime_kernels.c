/* The runtime's kernels, which do nothing, and what compilers put into programs for them. */

#include "runtime.h"

static int launch(dim3 grid, dim3 block, void *stream) {
    bool is_captured;
    if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z) {
        return refuse(INVALID_VALUE, "a launch of no threads");
    }
    return begin_work(stream, &is_captured);
}
EXPORT cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                    size_t shared, cudaStream_t stream) {
    (void)function;
    (void)arguments;
    (void)shared;
    return CALL(launch(grid, block, stream));
}
EXPORT cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments,
                                      size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function,
                                       void **arguments) {
    (void)function;
    (void)arguments;
    return CALL(launch(config->gridDim, config->blockDim, config->stream));
}

static _Thread_local struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} pushed;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared = shared;
    pushed.stream = stream;
    return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *stream = pushed.stream;
    return cudaSuccess;
}
EXPORT cudaError_t __cudaGetKernel(const void **kernel, const void *function) {
    *kernel = function;
    return cudaSuccess;
}
EXPORT void **__cudaRegisterFatBinary(void *binary) {
    (void)binary;
    static void *handle;
    return &handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
EXPORT void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
EXPORT void __cudaRegisterFunction(void) {}
EXPORT void __cudaRegisterVar(void) {}
EXPORT char __cudaInitModule(void **handle) {
    (void)handle;
    return 1;
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
    (void)function;
    *found = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024, .numRegs = 32, .binaryVersion = 90, .ptxVersion = 90};
    return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
    (void)function;
    (void)attribute;
    (void)value;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *count, const void *function, int size, size_t shared, unsigned flags) {
    (void)function;
    (void)size;
    (void)shared;
    (void)flags;
    *count = 2;
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *source, size_t size,
                                      size_t offset, enum cudaMemcpyKind kind) {
    (void)symbol;
    (void)source;
    (void)size;
    (void)offset;
    (void)kind;
    return CALL(begin_unsafe("cudaMemcpyToSymbol")); /* only kernels would read it */
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function,
                                                    unsigned version, unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *status) {
    (void)version;
    (void)flags;
    *function = find_function(name);
    if (status) {
        *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    }
    return cudaSuccess;
}
EXPORT cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop(void) { return cudaSuccess; }
