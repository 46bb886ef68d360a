// A compiler in C++ that writes a .ttb file: y = Relu(x w' + b), for wormhole_n150.
//
//   stitch schema ttb -o program.fbs && flatc --cpp --scoped-enums program.fbs
//   g++ -std=c++17 -O1 emit.cpp -o emit && ./emit dense.ttb
// Tables are written children first, with fields in the order of the schema, as Stitch writes them:
// it reads any order, but so the bytes are equal.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "program_generated.h"

using namespace stitch::ttb::generated;
template <typename T> using Ref = flatbuffers::Offset<T>;
template <typename T> using Refs = std::vector<Ref<T>>;
static flatbuffers::FlatBufferBuilder b;

static uint32_t crc32(const uint8_t *p, size_t size) {  // zlib's polynomial
  uint32_t crc = ~0u;
  while (size--) {
    crc ^= *p++;
    for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? 0xEDB88320u ^ (crc >> 1) : crc >> 1;
  }
  return ~crc;
}

// A table whose fields `add` adds, in the order of the schema.
template <typename T, typename Add> Ref<T> table(Add add) {
  typename T::Builder fields(b);
  add(fields);
  return fields.Finish();
}

static Ref<flatbuffers::String> text(const std::string &word) {  // equal texts once
  static std::map<std::string, Ref<flatbuffers::String>> known;
  auto found = known.find(word);
  return found != known.end() ? found->second : known[word] = b.CreateString(word);
}

static Ref<ValueType> type(std::vector<int64_t> shape) {  // of float32, the default
  auto sizes = b.CreateVector(shape);
  return table<ValueType>([&](auto &t) { t.add_shape(sizes); });
}

static Ref<Layout> layout(Space space, int64_t address = -1) {  // row-major and interleaved
  return table<Layout>([&](auto &t) { t.add_space(space), t.add_address(address); });
}

static Ref<Value> value(const char *name, Ref<ValueType> type, Ref<Layout> layout) {
  auto word = text(name);
  return table<Value>([&](auto &t) { t.add_name(word), t.add_type(type), t.add_layout(layout); });
}

static Ref<Operation> operation(const char *op, const char *location, std::vector<int32_t> inputs,
                                std::vector<int32_t> outputs, const char *flag = nullptr) {
  auto name = text(op), where = text(location);
  auto in = b.CreateVector(inputs), out = b.CreateVector(outputs);
  Ref<flatbuffers::Vector<Ref<Attribute>>> attributes;
  if (flag) {
    auto key = text(flag);
    auto one = table<IntAttribute>([&](auto &t) { t.add_value(1); }).Union();
    attributes = b.CreateVector(Refs<Attribute>{table<Attribute>([&](auto &t) {
      t.add_name(key), t.add_value_type(AttributeValue::IntAttribute), t.add_value(one);
    })});
  }
  return table<Operation>([&](auto &t) {
    t.add_op(name), t.add_inputs(in), t.add_outputs(out);
    t.add_attributes(attributes), t.add_location(where);
  });
}

static Ref<SpaceShape> space(uint32_t banks, uint64_t base, uint64_t limit, uint64_t alignment,
                             uint64_t granule = 0) {
  return table<SpaceShape>([&](auto &t) {
    t.add_banks(banks), t.add_base(base), t.add_limit(limit);
    t.add_alignment(alignment), t.add_granule(granule);
  });
}

int main(int, char **argv) {
  std::vector<float> w(32 * 64), bias(32);  // constants: a segment of the file each
  for (int i = 0; i < 32 * 64; i++) w[i] = (i % 7 - 3) / 4.0f;
  for (int i = 0; i < 32; i++) bias[i] = i / 8.0f;
  auto x = text("x");
  auto input = table<InputSlot>([&](auto &t) { t.add_name(x), t.add_value(0); });
  auto inputs = b.CreateVector(Refs<InputSlot>{input});
  auto y = text("y");
  auto output = table<OutputSlot>([&](auto &t) { t.add_name(y), t.add_value(4); });
  auto outputs = b.CreateVector(Refs<OutputSlot>{output});

  auto of_x = type({8, 64});  // types and layouts may be shared
  auto in_l1 = layout(Space::L1);
  Refs<Value> list{value("x", of_x, in_l1)};
  text("w");
  auto of_w = type({32, 64});
  auto in_dram = layout(Space::DRAM);
  list.push_back(value("w", of_w, in_dram));
  text("b"), list.push_back(value("b", type({32}), in_dram));
  text("gemm");
  auto of_y = type({8, 32});
  list.push_back(value("gemm", of_y, layout(Space::L1, 0)));  // in the scratch, at byte 0
  list.push_back(value("relu", of_y, in_l1));
  auto values = b.CreateVector(list);
  auto gemm = operation("Gemm", "model.cc:7", {0, 1, 2}, {3}, "transB");
  auto relu = operation("Relu", "model.cc:8", {3}, {4});
  auto operations = b.CreateVector(Refs<Operation>{gemm, relu});
  auto first = table<Constant>([&](auto &t) { t.add_value(1), t.add_segment(0); });
  auto second = table<Constant>([&](auto &t) { t.add_value(2), t.add_segment(1); });
  auto constants = b.CreateVector(Refs<Constant>{first, second});
  auto name = text("dense");
  auto scratch = table<Scratch>([](auto &t) { t.add_space(Space::L1), t.add_size_per_bank(32); });
  auto program = table<Program>([&](auto &t) {
    t.add_name(name), t.add_inputs(inputs), t.add_outputs(outputs), t.add_values(values);
    t.add_operations(operations), t.add_constants(constants), t.add_scratch(scratch);
  });
  auto programs = b.CreateVector(Refs<Program>{program});

  auto model = text("wormhole_n150");
  auto host = space(1, 0, 17179869184, 64), l1 = space(64, 103840, 1466368, 16, 32);
  auto dram = space(12, 2968640, 1073118784, 32);
  auto machine = table<Machine>([&](auto &t) {
    t.add_name(model), t.add_core_rows(8), t.add_core_columns(8);
    t.add_host(host), t.add_l1(l1), t.add_dram(dram);
  });
  std::vector<uint8_t> data(32 * 64 * 4 + 32 * 4);  // segments begin at multiples of 64
  memcpy(&data[0], w.data(), 8192), memcpy(&data[8192], bias.data(), 128);
  auto segment = [&](uint64_t offset, uint64_t length) {
    auto crc = crc32(data.data() + offset, length);
    return table<Segment>([&](auto &t) { t.add_offset(offset), t.add_length(length), t.add_crc32(crc); });
  };
  auto s0 = segment(0, 8192), s1 = segment(8192, 128);
  auto segments = b.CreateVector(Refs<Segment>{s0, s1});
  auto producer = text("emit.cpp");
  auto version = table<Version>([&](auto &t) { t.add_major(1), t.add_minor(1); });
  FinishSizePrefixedBinaryBuffer(b, table<Binary>([&](auto &t) {
    t.add_version(version), t.add_producer(producer), t.add_opset(26);
    t.add_machine(machine), t.add_programs(programs), t.add_segments(segments);
  }));

  std::vector<uint8_t> file(b.GetBufferPointer(), b.GetBufferPointer() + b.GetSize());
  auto crc = crc32(file.data(), file.size());
  for (int i = 0; i < 4; i++) file.push_back(crc >> 8 * i);
  file.resize((file.size() + 63) / 64 * 64);
  file.insert(file.end(), data.begin(), data.end());
  FILE *out = fopen(argv[1], "wb");
  return !out || fwrite(file.data(), 1, file.size(), out) != file.size() || fclose(out);
}
