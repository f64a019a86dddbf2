// The kernels of one instruction set, under one name that the others do not have.
#include "kernels.h"

#define KVERN_PASTE(a, b) a##b
#define KVERN_NAME(a, b) KVERN_PASTE(a, b)
#define KVERN_TEXT(a) #a
#define KVERN_STRING(a) KVERN_TEXT(a)

namespace kvern {
namespace KVERN_ISA {

void embedding(const Op&, const Step&, int, int);
void take_rows(const Op&, const Step&, int, int);
void quantize(const Op&, const Step&, int, int);
void linear(const Op&, const Step&, int, int);
void add(const Op&, const Step&, int, int);
void scale(const Op&, const Step&, int, int);
void rms_norm(const Op&, const Step&, int, int);
void gate(const Op&, const Step&, int, int);
void rotary(const Op&, const Step&, int, int);
void write_kv(const Op&, const Step&, int, int);
void attention(const Op&, const Step&, int, int);
void argmax(const Op&, const Step&, int, int);
void sample(const Op&, const Step&, int, int);
size_t packed_bytes(int32_t type, int64_t out, int64_t in);
void pack(int32_t type, const uint8_t* rows, int64_t row_bytes, int64_t out, int64_t in, uint8_t* panels,
          int64_t first_panel, int64_t last_panel);

}  // namespace KVERN_ISA

const Kernels* KVERN_NAME(kernels_, KVERN_ISA)() {
  using namespace KVERN_ISA;
  // In the order of OpKind.
  static const Kernels table = {
      KVERN_STRING(KVERN_ISA),
      {embedding, take_rows, quantize, linear, add, scale, rms_norm, gate, rotary, write_kv, attention, argmax,
       sample},
      packed_bytes,
      pack,
  };
  return &table;
}

}  // namespace kvern
