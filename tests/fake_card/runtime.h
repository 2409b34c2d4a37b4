/* What the parts of the runtime share. */

#ifndef RUNTIME_H
#define RUNTIME_H

#include "card.h"

#include <cuda_runtime_api.h>

/* What a call returns; as in the real one cudaGetLastError tells it again. */
cudaError_t note(int code);

/* Each call of the runtime makes the context the thread's where it has none. */
#define CALL(code) note(enter_context() ? NOT_INITIALIZED : (code))

#endif
