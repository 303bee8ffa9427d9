/*
 * A stand-in for NVIDIA's driver libraries (libcuda.so.1 and libnvidia-ml.so.1), for machines without an NVIDIA GPU.
 *
 * It has the functions that Roost calls, with the signatures and return codes of NVIDIA's headers. What it says comes
 * from files in the folder $NVIDIA_STAND_IN, read at every call, so that a test can lose a GPU while a process runs:
 *
 *   gpus    one line per GPU: a status (0, or the NVML code that every call on this GPU returns, 15 for a lost one)
 *   mig     how many instances each GPU is cut into (default 0: it is not partitioned)
 *   nvml    what nvmlInit returns (default 0)
 *   loads   how often the driver was loaded again: NVML that was opened before the last time fails until it is closed
 *   cuda    what cuInit returns (default 0); -1: it never returns; -2: it prints a text and ends the process
 *   inits   written: a line with the process id at every call of cuInit
 *
 * As in NVIDIA's driver, cuInit works once in a process, and in a child forked afterwards CUDA returns 3.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CUDA_NOT_INITIALIZED = 3, CUDA_NO_DEVICE = 100, CUDA_INVALID_DEVICE = 101, UNKNOWN = 999, MAX_GPUS = 16, MEBIBYTE = 1 << 20 };

static FILE *open_file(const char *name, const char *mode) {
    char path[4096];
    const char *folder = getenv("NVIDIA_STAND_IN");
    snprintf(path, sizeof path, "%s/%s", folder ? folder : ".", name);
    return fopen(path, mode);
}

static int number_in(const char *name) {
    int value = 0;
    FILE *file = open_file(name, "r");
    if (file) {
        if (fscanf(file, "%d", &value) != 1) value = 0;
        fclose(file);
    }
    return value;
}

static int read_gpus(int *status) {
    int count = 0;
    FILE *file = open_file("gpus", "r");
    if (!file) return 0;
    while (count < MAX_GPUS && fscanf(file, "%d", &status[count]) == 1) count++;
    fclose(file);
    return count;
}

/* NVML ------------------------------------------------------------------------------------------------------------ */

static int users, loads;

int nvmlInit_v2(void) {
    int code = number_in("nvml");
    if (!code && users++ == 0) loads = number_in("loads");
    return code;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return nvmlInit_v2(); }

int nvmlShutdown(void) {
    if (users) users--;
    return 0;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    int status[MAX_GPUS];
    *count = (unsigned)read_gpus(status);
    return loads == number_in("loads") ? 0 : UNKNOWN;
}

/* A handle is the number of the GPU plus one, so that it is no null pointer; that of an instance, 100 times this plus the
   number of the instance plus one. */
static int gpu_of(void *handle) {
    long number = (long)handle;
    return (int)(number > 100 ? number / 100 : number) - 1;
}

static int status_of(void *handle) {
    int status[MAX_GPUS], count = read_gpus(status), index = gpu_of(handle);
    return index >= 0 && index < count ? status[index] : 2;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = (void *)(long)(index + 1);
    return status_of(*handle);
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size) {
    int instance = (long)handle > 100 ? (int)((long)handle % 100) : 0;
    snprintf(uuid, size, "%s-00000000-0000-0000-0000-%010d%02d", instance ? "MIG" : "GPU", instance, gpu_of(handle));
    return status_of(handle);
}

int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
    snprintf(name, size, "NVIDIA Stand-In");
    return status_of(handle);
}

int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *sizes) {
    sizes[0] = 81920ULL * MEBIBYTE, sizes[1] = 80896ULL * MEBIBYTE, sizes[2] = 1024ULL * MEBIBYTE;
    return status_of(handle);
}

int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates) {
    rates[0] = rates[1] = 0;
    return status_of(handle);
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *processes) {
    (void)processes;
    *count = 0;
    return status_of(handle);
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    *current = *pending = number_in("mig") > 0;
    return status_of(handle);
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
    *count = 7;
    return status_of(handle);
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **instance) {
    *instance = (void *)((long)handle * 100 + index + 1);
    return (int)index < number_in("mig") ? status_of(handle) : 6; /* not found */
}

/* CUDA ------------------------------------------------------------------------------------------------------------ */

static pid_t initialised_in;
static int visible[MAX_GPUS], num_visible;

int cuInit(unsigned flags) {
    int status[MAX_GPUS], count = read_gpus(status), code = number_in("cuda");
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    FILE *log = open_file("inits", "a");
    (void)flags;
    if (log) {
        fprintf(log, "%d\n", (int)getpid());
        fclose(log);
    }
    if (code == -1) {
        for (;;) pause();
    }
    if (code == -2) {
        printf("this is no answer\n");
        fflush(stdout);
        _exit(0);
    }
    if (code) return code;
    if (initialised_in && initialised_in != getpid()) return CUDA_NOT_INITIALIZED;
    initialised_in = getpid();
    num_visible = 0;
    for (int index = 0; index < count; index++) {
        char number[8], all[256];
        snprintf(number, sizeof number, ",%d,", index);
        snprintf(all, sizeof all, ",%s,", list ? list : "");
        if (!status[index] && (!list || strstr(all, number))) visible[num_visible++] = index;
    }
    return num_visible ? 0 : CUDA_NO_DEVICE;
}

int cuDeviceGetCount(int *count) {
    if (initialised_in != getpid()) return CUDA_NOT_INITIALIZED;
    *count = num_visible;
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    if (initialised_in != getpid()) return CUDA_NOT_INITIALIZED;
    *device = ordinal;
    return ordinal < num_visible ? 0 : CUDA_INVALID_DEVICE;
}

int cuDeviceGetUuid(unsigned char *uuid, int device) {
    memset(uuid, 0, 16);
    uuid[15] = (unsigned char)visible[device]; /* below 10, so that decimal and hexadecimal are the same */
    return 0;
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { return cuDeviceGetUuid(uuid, device); }

int cuGetErrorName(int code, const char **name) {
    *name = code == UNKNOWN ? "CUDA_ERROR_UNKNOWN" : code == CUDA_NOT_INITIALIZED ? "CUDA_ERROR_NOT_INITIALIZED" : 0;
    return *name ? 0 : 1;
}
