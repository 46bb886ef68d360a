/* Trains a network on handwritten digits: the sequence diagram of a tracing interface in C.
 *
 *   python digits_file.py digits.bin && ./train_digits digits.bin trained.json
 *
 * Each step below is an arrow of the diagram. `compare.py` trains the same network in Python and
 * compares the weights in trained.json, bit by bit. */
#include "stitch.h"
#include <stdio.h>
#include <stdlib.h>

enum { BATCH = 32, PIXELS = 64, CLASSES = 10, ROWS = 1437, EPOCHS = 10, STEPS = ROWS / BATCH };

static float images[ROWS][PIXELS];
static int64_t labels[ROWS];

/* Ends the program with what an error says. */
static void check(stitch_error_t error) {
  if (!error) return;
  const char *remedy = stitch_error_remedy(error);
  fprintf(stderr, "train_digits: error %d: %s\n%s%s\n", stitch_error_code(error),
          stitch_error_message(error), *remedy ? "  try: " : "", remedy);
  stitch_error_destroy(error);
  exit(1);
}

/* Reads the images, from 0 to 1, and the labels. */
static void read_digits(const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file || fread(images, sizeof images, 1, file) != 1 ||
      fread(labels, sizeof labels, 1, file) != 1) {
    fprintf(stderr, "train_digits: cannot read %s: make it by python digits_file.py %s\n", path, path);
    exit(1);
  }
  fclose(file);
}

/* from_fx: one call for each layer of the module. */
static stitch_computation_graph_t build_graph(void) {
  const int64_t shape[] = {BATCH, 8, 8};
  stitch_computation_graph_t graph;
  stitch_tensor_t x;
  check(stitch_computation_graph_create("digits", &graph));
  check(stitch_computation_graph_add_input(graph, "image", STITCH_FLOAT32, shape, 3, &x));
  check(stitch_computation_graph_add_op_flat(graph, x, &x));
  check(stitch_computation_graph_add_op_dense(graph, x, 96, NULL, &x));
  check(stitch_computation_graph_add_op_relu(graph, x, &x));
  check(stitch_computation_graph_add_op_dense(graph, x, 48, NULL, &x));
  check(stitch_computation_graph_add_op_relu(graph, x, &x));
  check(stitch_computation_graph_add_op_dense(graph, x, CLASSES, NULL, &x));
  check(stitch_computation_graph_add_output(graph, "scores", x));
  check(stitch_computation_graph_set_loss(graph, "sparse_categorical_crossentropy"));
  return graph;
}

/* optimization: a graph, an optimizer and an algorithm give a compiled model. */
static stitch_model_compilation_result_t compile(stitch_computation_graph_t graph) {
  stitch_optimizer_t optimizer;
  stitch_model_compilation_result_t result;
  check(stitch_optimizer_create("{\"optimizer\": \"adam\", \"lr\": 0.002}", &optimizer));
  check(stitch_computation_graph_compile(graph, optimizer, "none", "host", &result));
  check(stitch_optimizer_destroy(optimizer));
  check(stitch_computation_graph_destroy(graph));
  return result;
}

/* One iteration of the loop: forward, backward, update. Returns the loss. */
static float step(stitch_model_training_instance_t training, size_t row) {
  float loss;
  check(stitch_set_tensor_float(training, "image", images[row], BATCH * PIXELS));
  check(stitch_set_tensor_int64(training, "label", &labels[row], BATCH));
  check(stitch_model_training_instance_forward(training));
  check(stitch_get_tensor_float(training, "loss", &loss, 1));
  check(stitch_model_training_instance_backward(training));
  check(stitch_model_training_instance_update(training));
  return loss;
}

/* Writes the compiled model with its weights. */
static void write_json(stitch_model_compilation_result_t result, const char *path) {
  size_t needed;
  check(stitch_model_compilation_result_as_json(result, NULL, 0, &needed));
  char *text = (char *)malloc(needed);
  FILE *file = fopen(path, "wb");
  if (!text || !file) {
    fprintf(stderr, "train_digits: cannot write %s\n", path);
    exit(1);
  }
  check(stitch_model_compilation_result_as_json(result, text, needed, NULL));
  if (fwrite(text, needed - 1, 1, file) != 1 || fclose(file)) {
    fprintf(stderr, "train_digits: cannot write %s\n", path);
    exit(1);
  }
  free(text);
}

int main(int argc, char **argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: train_digits digits.bin trained.json\n");
    return 2;
  }
  read_digits(argv[1]);
  stitch_computation_graph_t graph = build_graph();
  stitch_model_compilation_result_t result = compile(graph);

  stitch_model_training_instance_t training;
  check(stitch_start_training(result, &training));
  float first = 0, loss = 0;
  for (int epoch = 0; epoch < EPOCHS; epoch++) {
    for (size_t i = 0; i < STEPS; i++) {
      loss = step(training, i * BATCH);
      if (epoch == 0 && i == 0) first = loss;
    }
    printf("epoch %d: loss %.6f\n", epoch + 1, (double)loss);
  }

  float bias[CLASSES]; /* Reading and writing elements. */
  check(stitch_get_tensor_float(training, "dense_5.bias", bias, CLASSES));
  check(stitch_set_tensor_float(training, "dense_5.bias", bias, CLASSES));
  write_json(result, argv[2]);
  check(stitch_stop_training(training));
  check(stitch_model_compilation_result_destroy(result));
  printf("the loss fell from %.3f to %.3f\n", (double)first, (double)loss);
  return loss < first / 5 ? 0 : 1;
}
