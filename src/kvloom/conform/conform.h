/* The function that `kvloom conform run --dialect DIALECT library.so:function` calls, once for each vector. */
#ifndef KVLOOM_CONFORM_H
#define KVLOOM_CONFORM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const char *name;       /* of the argument or result; element i of a list is "name.i" */
    const char *dtype;      /* "float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64", ... */
    int64_t rank;
    const int64_t *shape;
    const int64_t *strides; /* in elements */
    void *data;             /* of element 0 */
} kvloom_tensor;

/* What a function returns that does not do such calls, as of a dtype that it has no kernel for: the vector is skipped. */
#define KVLOOM_UNSUPPORTED (-2)

/*
 * Computes one call: writes the outputs, and the inputs that the operator updates in place. Returns 0; or, if it
 * refuses the call, another number after writing a sentence that ends with 0 to `message`, and nothing else. Outputs
 * are zero; those of a call that must be refused are there, too, and may have other sizes than the call means.
 * `attributes` is a JSON object of all arguments that are no tensors; one that is missing has its default, which
 * `kvloom conform describe` prints. Everything belongs to the caller and lives until the function returns.
 */
typedef int kvloom_operator(const char *dialect, const char *attributes, int64_t num_inputs,
                            const kvloom_tensor *inputs, int64_t num_outputs, const kvloom_tensor *outputs,
                            char *message, int64_t message_size);

#ifdef __cplusplus
}
#endif
#endif
