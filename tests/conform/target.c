/* Writes to pages as vLLM does: a target of the runner in C, with a bug if BUG is defined. */
#include "conform.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const kvloom_tensor *find(const kvloom_tensor *tensors, int64_t count, const char *name) {
    for (int64_t i = 0; i < count; i++)
        if (!strcmp(tensors[i].name, name)) return &tensors[i];
    return 0;
}

static int refuse(char *message, int64_t size, const char *text) {
    snprintf(message, (size_t)size, "%s", text);
    return 1;
}

static int64_t width(const char *dtype) {
    if (!strcmp(dtype, "float32")) return 4;
    return !strcmp(dtype, "float16") || !strcmp(dtype, "bfloat16") ? 2 : 0;
}

int reshape_and_cache_flash(const char *dialect, const char *attributes, int64_t num_inputs,
                            const kvloom_tensor *inputs, int64_t num_outputs, const kvloom_tensor *outputs,
                            char *message, int64_t message_size) {
    (void)dialect, (void)attributes, (void)num_outputs, (void)outputs;
    const char *names[] = {"key", "value", "key_cache", "value_cache"};
    const kvloom_tensor *x[4];
    for (int i = 0; i < 4; i++) {
        x[i] = find(inputs, num_inputs, names[i]);
        if (!x[i] || !width(x[i]->dtype) || strcmp(x[i]->dtype, x[0]->dtype) || x[i]->rank != (i < 2 ? 3 : 4))
            return refuse(message, message_size, "a tensor is missing, or has another dtype or rank");
    }
    const kvloom_tensor *slots = find(inputs, num_inputs, "slot_mapping");
    if (!slots || strcmp(slots->dtype, "int64") || slots->rank != 1 || slots->shape[0] > x[0]->shape[0])
        return refuse(message, message_size, "slot_mapping must be one int64 for each token");
    for (int i = 1; i < 4; i++)
        for (int axis = 1; axis <= 2; axis++)
            if (x[i]->shape[axis + (i >= 2)] != x[0]->shape[axis]) return refuse(message, message_size, "heads, dim");
    if (x[1]->shape[0] != x[0]->shape[0] || x[2]->shape[0] != x[3]->shape[0] || x[2]->shape[1] != x[3]->shape[1])
        return refuse(message, message_size, "value must be as key");
    int64_t size = x[2]->shape[1], bytes = width(x[0]->dtype);
    const int64_t *slot = slots->data;
    for (int64_t t = 0; t < slots->shape[0]; t++)
        if (slot[t * slots->strides[0]] >= x[2]->shape[0] * size) return refuse(message, message_size, "slot_mapping");
    for (int64_t t = 0; t < slots->shape[0]; t++) {
        int64_t s = slot[t * slots->strides[0]];
        if (s < 0) continue;
        for (int side = 0; side < 2; side++)
            for (int64_t h = 0; h < x[0]->shape[1]; h++)
                for (int64_t d = 0; d < x[0]->shape[2]; d++) {
                    const kvloom_tensor *from = x[side], *to = x[2 + side];
#ifdef BUG
                    from = x[1 - side];
#endif
                    int64_t source = t * from->strides[0] + h * from->strides[1] + d * from->strides[2];
                    int64_t target = s / size * to->strides[0] + s % size * to->strides[1] + h * to->strides[2] +
                                     d * to->strides[3];
                    memcpy((char *)to->data + target * bytes, (const char *)from->data + source * bytes, (size_t)bytes);
                }
    }
    return 0;
}

static int has_two_tokens(const kvloom_tensor *inputs, int64_t num_inputs) {
    const kvloom_tensor *slots = find(inputs, num_inputs, "slot_mapping");
    return slots && slots->rank == 1 && slots->shape[0] == 2;
}

/* The same, but calls of two tokens crash. */
int crashes(const char *dialect, const char *attributes, int64_t num_inputs, const kvloom_tensor *inputs,
            int64_t num_outputs, const kvloom_tensor *outputs, char *message, int64_t message_size) {
    if (has_two_tokens(inputs, num_inputs)) *(volatile int *)0 = 1;
    return reshape_and_cache_flash(dialect, attributes, num_inputs, inputs, num_outputs, outputs, message,
                                   message_size);
}

/* The same, but calls of two tokens do not end. */
int hangs(const char *dialect, const char *attributes, int64_t num_inputs, const kvloom_tensor *inputs,
          int64_t num_outputs, const kvloom_tensor *outputs, char *message, int64_t message_size) {
    while (has_two_tokens(inputs, num_inputs)) sleep(1);
    return reshape_and_cache_flash(dialect, attributes, num_inputs, inputs, num_outputs, outputs, message,
                                   message_size);
}

/* Refuses every call, but not before it wrote to each output: these are there whether or not a call is legal. */
int writes_then_refuses(const char *dialect, const char *attributes, int64_t num_inputs,
                        const kvloom_tensor *inputs, int64_t num_outputs, const kvloom_tensor *outputs,
                        char *message, int64_t message_size) {
    (void)dialect, (void)attributes, (void)num_inputs, (void)inputs;
    if (num_outputs != 2 || !outputs[0].data || !outputs[1].data) return refuse(message, message_size, "no outputs");
    return refuse(message, message_size, "two outputs");
}

/* The same, but of float16 alone. */
int only_float16(const char *dialect, const char *attributes, int64_t num_inputs, const kvloom_tensor *inputs,
                 int64_t num_outputs, const kvloom_tensor *outputs, char *message, int64_t message_size) {
    const kvloom_tensor *key = find(inputs, num_inputs, "key");
    if (key && strcmp(key->dtype, "float16")) {
        refuse(message, message_size, "there is a kernel for float16 only");
        return KVLOOM_UNSUPPORTED;
    }
    return reshape_and_cache_flash(dialect, attributes, num_inputs, inputs, num_outputs, outputs, message,
                                   message_size);
}
