/* A compiler in C without any library that writes a .ttb file: y = Relu(x w' + b), for wormhole_n150.
 *
 *   cc -std=c11 -O1 emit.c -o emit && ./emit dense.ttb
 *
 * A flatbuffer is written from its end to its beginning. Slots are those of `stitch schema ttb`. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
static uint8_t buffer[1 << 16];
static uint32_t used, widest = 1;    /* bytes from the end; the largest alignment so far */
static uint32_t slots[16], fields, began; /* of the table that is being written */
static uint32_t vtables[64], known;

static uint8_t *at(uint32_t offset) { return buffer + sizeof buffer - offset; }
static uint32_t crc32(const uint8_t *p, size_t size) { /* zlib's polynomial */
  uint32_t crc = ~0u;
  while (size--) {
    crc ^= *p++;
    for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? 0xEDB88320u ^ (crc >> 1) : crc >> 1;
  }
  return ~crc;
}

/* Align so that after `more` bytes a number of `size` bytes is aligned. */
static void align(uint32_t size, uint32_t more) {
  if (size > widest) widest = size;
  used += -(used + more) & (size - 1);
}

static void put(uint64_t number, uint32_t size) {
  align(size, 0), used += size;
  for (uint32_t i = 0; i < size; i++) at(used)[i] = (uint8_t)(number >> 8 * i);
}

static void put_reference(uint32_t target) { align(4, 0), put(used + 4 - target, 4); }
static void begin(void) { memset(slots, 0, sizeof slots), fields = 0, began = used; }
static void note(uint32_t slot) { slots[slot] = used, fields = slot + 1; }
static void number(uint32_t slot, uint64_t value, uint32_t size) { put(value, size), note(slot); }
static void reference(uint32_t slot, uint32_t target) { put_reference(target), note(slot); }

static uint32_t end(void) { /* tables with fields at the same places share a vtable */
  uint16_t vtable[18];
  put(0, 4);
  uint32_t table = used, size = 2 * fields + 4, found = 0;
  vtable[0] = (uint16_t)size, vtable[1] = (uint16_t)(table - began);
  for (uint32_t i = 0; i < fields; i++) vtable[i + 2] = (uint16_t)(slots[i] ? table - slots[i] : 0);
  for (uint32_t i = 0; i < known; i++)
    if (!memcmp(at(vtables[i]), vtable, size)) found = vtables[i];
  if (!found) {
    for (uint32_t i = size / 2; i--;) put(vtable[i], 2);
    found = vtables[known++] = used;
  }
  for (int i = 0; i < 4; i++) at(table)[i] = (uint8_t)((found - table) >> 8 * i);
  return table;
}

static uint32_t text(const char *word) {
  uint32_t size = (uint32_t)strlen(word);
  align(4, size + 1), used += size + 1, memcpy(at(used), word, size), put(size, 4);
  return used;
}

static uint32_t numbers(const int64_t *values, uint32_t count, uint32_t size) {
  align(4, size * count), align(size, size * count);
  for (uint32_t i = count; i--;) put((uint64_t)values[i], size);
  put(count, 4);
  return used;
}

static uint32_t references(const uint32_t *targets, uint32_t count) {
  align(4, 4 * count);
  for (uint32_t i = count; i--;) put_reference(targets[i]);
  put(count, 4);
  return used;
}
#define INTS(size, ...) numbers((int64_t[]){__VA_ARGS__}, sizeof((int64_t[]){__VA_ARGS__}) / 8, size)
#define REFERENCES(...) references((uint32_t[]){__VA_ARGS__}, sizeof((uint32_t[]){__VA_ARGS__}) / 4)
enum { HOST, DRAM, L1 };

static uint32_t type(uint32_t shape) { return begin(), reference(0, shape), end(); } /* float32 */

static uint32_t value(uint32_t name, uint32_t type, uint32_t layout) {
  return begin(), reference(0, name), reference(1, type), reference(2, layout), end();
}

static uint32_t space(uint32_t banks, uint64_t base, uint64_t limit, uint64_t line, uint64_t granule) {
  begin();
  if (banks != 1) number(0, banks, 4), number(1, base, 8); /* defaults are not written */
  number(2, limit, 8), number(3, line, 8);
  if (granule) number(4, granule, 8);
  return end();
}

static uint32_t segment(uint64_t offset, uint64_t length, uint32_t crc) {
  if (begin(), offset) number(0, offset, 8);
  return number(1, length, 8), number(2, crc, 4), end();
}

static uint32_t operation(uint32_t op, uint32_t where, uint32_t in, uint32_t out, uint32_t flags) {
  begin(), reference(0, op), reference(2, in), reference(3, out);
  if (flags) reference(4, flags);
  return reference(5, where), end();
}

int main(int count, char **words) {
  static float data[32 * 64 + 32]; /* two constants: segments begin at multiples of 64 bytes */
  for (int i = 0; i < 32 * 64; i++) data[i] = (float)(i % 7 - 3) / 4;
  for (int i = 0; i < 32; i++) data[32 * 64 + i] = (float)i / 8;
  uint32_t x = text("x"), input = (begin(), reference(0, x), end()), inputs = REFERENCES(input);
  uint32_t y = text("y"), output = (begin(), reference(0, y), number(1, 4, 4), end());
  uint32_t outputs = REFERENCES(output), of_x = type(INTS(8, 8, 64));
  uint32_t in_l1 = (begin(), number(1, L1, 1), end()), vx = value(x, of_x, in_l1);
  uint32_t w = text("w"), of_w = type(INTS(8, 32, 64));
  uint32_t in_dram = (begin(), number(1, DRAM, 1), end()), vw = value(w, of_w, in_dram);
  uint32_t b = text("b"), vb = value(b, type(INTS(8, 32)), in_dram);
  uint32_t gemm = text("gemm"), of_y = type(INTS(8, 8, 32)); /* in the scratch, at byte 0 */
  uint32_t in_scratch = (begin(), number(1, L1, 1), number(6, 0, 8), end());
  uint32_t vg = value(gemm, of_y, in_scratch), relu = text("relu"), vy = value(relu, of_y, in_l1);
  uint32_t values = REFERENCES(vx, vw, vb, vg, vy);
  uint32_t op = text("Gemm"), where = text("model.cc:7"), in = INTS(4, 0, 1, 2), out = INTS(4, 3);
  uint32_t key = text("transB"), one = (begin(), number(0, 1, 8), end());
  uint32_t flag = (begin(), reference(0, key), number(1, 1, 1), reference(2, one), end());
  uint32_t first = operation(op, where, in, out, REFERENCES(flag));
  op = text("Relu"), where = text("model.cc:8"), in = INTS(4, 3), out = INTS(4, 4);
  uint32_t second = operation(op, where, in, out, 0), operations = REFERENCES(first, second);
  first = (begin(), number(0, 1, 4), end());
  second = (begin(), number(0, 2, 4), number(1, 1, 4), end());
  uint32_t constants = REFERENCES(first, second), name = text("dense");
  uint32_t scratch = (begin(), number(0, L1, 1), number(1, 32, 8), end());
  begin(), reference(0, name), reference(2, inputs), reference(3, outputs), reference(4, values);
  reference(5, operations), reference(6, constants), reference(7, scratch);
  uint32_t program = end(), programs = REFERENCES(program), model = text("wormhole_n150");
  uint32_t host = space(1, 0, 17179869184, 64, 0), l1 = space(64, 103840, 1466368, 16, 32);
  uint32_t dram = space(12, 2968640, 1073118784, 32, 0);
  begin(), reference(0, model), number(1, 8, 4), number(2, 8, 4);
  uint32_t machine = (reference(3, host), reference(4, l1), reference(5, dram), end());
  first = segment(0, 8192, crc32((uint8_t *)data, 8192));
  second = segment(8192, 128, crc32((uint8_t *)data + 8192, 128));
  uint32_t segments = REFERENCES(first, second), producer = text("emit.c");
  uint32_t version = (begin(), number(0, 1, 2), number(1, 1, 2), end());
  begin(), reference(0, version), reference(1, producer), number(2, 26, 4);
  uint32_t root = (reference(3, machine), reference(4, programs), reference(5, segments), end());
  align(widest, 12), used += 4, memcpy(at(used), "STCH", 4), put_reference(root), put(used, 4);
  FILE *file = count == 2 ? fopen(words[1], "wb") : NULL;
  if (!file) return 1;
  uint32_t crc = crc32(at(used), used), size = (used + 4 + 63) / 64 * 64;
  uint8_t tail[68] = {(uint8_t)crc, (uint8_t)(crc >> 8), (uint8_t)(crc >> 16), (uint8_t)(crc >> 24)};
  fwrite(at(used), 1, used, file), fwrite(tail, 1, size - used, file);
  return fwrite(data, 1, sizeof data, file) != sizeof data || fclose(file);
}
