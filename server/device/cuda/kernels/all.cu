// One unit, so that one fat binary holds every kernel.
#include "server/device/cuda/kernels/adamw.cu"
#include "server/device/cuda/kernels/cast.cu"
#include "server/device/cuda/kernels/finite.cu"
#include "server/device/cuda/kernels/norm.cu"
#include "server/device/cuda/kernels/reduce.cu"
#include "server/device/cuda/kernels/rule.cu"
#include "server/device/cuda/kernels/sgd.cu"
