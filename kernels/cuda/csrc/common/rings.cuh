// Rings of rows: a request's last tokens, each at its position modulo the ring's capacity.
#pragma once
#include "common/device.cuh"

template <class T> struct Rings {
    T* rows;
    int64 ring_stride, row_stride, count;  // count: slots of all rings
    int capacity;

    __device__ bool has(int64 slot) const { return slot >= 0 && slot < count; }
    __device__ T* row(int64 ring, int64 place) const { return rows + ring * ring_stride + place * row_stride; }
};
