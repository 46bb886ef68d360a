/* Uses libstitch.so in the ways that its first argument names; test_c_library.py runs it.
 * Prints what went wrong and ends with 1, or prints "ok". */
#define _GNU_SOURCE
#include "stitch.h"
#include <locale.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define REQUIRE(what)                                             \
  do {                                                            \
    if (!(what)) {                                                \
      printf("line %d: %s\n", __LINE__, #what);                   \
      exit(1);                                                    \
    }                                                             \
  } while (0)

static void ok(stitch_error_t error) {
  if (!error) return;
  printf("error %d: %s | %s\n", stitch_error_code(error), stitch_error_message(error),
         stitch_error_remedy(error));
  exit(1);
}

/* The code of an error, which is destroyed. */
static int code(stitch_error_t error) {
  int found = stitch_error_code(error);
  stitch_error_destroy(error);
  return found;
}

static stitch_device_t device;
static stitch_program_t program;

static void open_all(const char *path) {
  ok(stitch_open_device("host", "numpy", &device));
  ok(stitch_load(device, path, &program));
}

/* The program doubles 2x3 elements. */
static stitch_error_t twice(float x) {
  float in[6], out[6];
  const float *ins[] = {in};
  float *outs[] = {out};
  for (int i = 0; i < 6; i++) in[i] = x + (float)i;
  stitch_error_t error = stitch_run(program, ins, 1, outs, 1);
  if (!error)
    for (int i = 0; i < 6; i++) REQUIRE(out[i] == 2 * (x + (float)i));
  return error;
}

static long resident_kib(void) {
  long pages = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  REQUIRE(file && fscanf(file, "%*d %ld", &pages) == 1);
  fclose(file);
  return pages * sysconf(_SC_PAGESIZE) / 1024;
}

static void create_and_destroy(int times) {
  const int64_t shape[] = {2, 3};
  for (int i = 0; i < times; i++) {
    stitch_computation_graph_t graph;
    stitch_optimizer_t optimizer;
    stitch_tensor_t x;
    ok(stitch_computation_graph_create("g", &graph));
    ok(stitch_computation_graph_add_input(graph, "x", STITCH_FLOAT32, shape, 2, &x));
    ok(stitch_optimizer_create("sgd", &optimizer));
    ok(stitch_optimizer_destroy(optimizer));
    ok(stitch_computation_graph_destroy(graph));
    if (i % 20 == 0)
      REQUIRE(code(stitch_computation_graph_destroy(graph)) == STITCH_ERROR_INVALID_HANDLE);
  }
}

static void flat_memory(int times) {
  create_and_destroy(times / 5);
  long before = resident_kib();
  create_and_destroy(times);
  long grown = resident_kib() - before;
  printf("%d times: %ld KiB more\n", times, grown);
  REQUIRE(grown < 2048);
}

static void *use_all(void *argument) {
  long number = (long)argument;
  for (int i = 0; i < 200; i++) {
    stitch_device_t wrong = {0};
    ok(twice((float)(number * 1000 + i)));
    REQUIRE(code(stitch_close_device(wrong)) == STITCH_ERROR_INVALID_HANDLE);
    create_and_destroy(1);
  }
  return NULL;
}

static void *open_first(void *argument) {
  stitch_device_t *out = (stitch_device_t *)argument;
  ok(stitch_open_device("host", NULL, out));
  return NULL;
}

static void *close_shared(void *argument) {
  *(int *)argument = code(stitch_close_device(device));
  return NULL;
}

enum { THREADS = 8 };

/* The first call of the process comes from eight threads at once. */
static void threads(const char *path) {
  pthread_t all[THREADS];
  stitch_device_t opened[THREADS];
  int codes[THREADS], closed = 0;
  for (int i = 0; i < THREADS; i++) pthread_create(&all[i], NULL, open_first, &opened[i]);
  for (int i = 0; i < THREADS; i++) pthread_join(all[i], NULL);
  for (int i = 0; i < THREADS; i++) ok(stitch_close_device(opened[i]));
  open_all(path);
  for (long i = 0; i < THREADS; i++) pthread_create(&all[i], NULL, use_all, (void *)i);
  for (int i = 0; i < THREADS; i++) pthread_join(all[i], NULL);
  for (int i = 0; i < THREADS; i++) pthread_create(&all[i], NULL, close_shared, &codes[i]);
  for (int i = 0; i < THREADS; i++) pthread_join(all[i], NULL);
  for (int i = 0; i < THREADS; i++) {
    REQUIRE(codes[i] == STITCH_OK || codes[i] == STITCH_ERROR_INVALID_HANDLE);
    closed += codes[i] == STITCH_OK;
  }
  REQUIRE(closed == 1);
}

static int plans, refused;

static void on_plan(void *context, size_t steps, size_t copies) {
  REQUIRE(context == &plans && copies <= steps);
  plans++;
  refused += code(twice(1)) != STITCH_OK;
  refused += code(stitch_close_device(device)) != STITCH_OK;
}

static void callback(const char *path) {
  open_all(path);
  ok(stitch_on_plan(device, on_plan, &plans));
  ok(twice(3));
  REQUIRE(plans > 0 && refused == 2 * plans);
  ok(twice(4));
}

static void fork_after_calls(const char *path) {
  open_all(path);
  stitch_error_t old = stitch_close_device((stitch_device_t){0});
  pid_t child = fork();
  if (child == 0) {
    stitch_error_t error = twice(1);
    REQUIRE(error && strstr(stitch_error_message(error), "forked"));
    REQUIRE(stitch_error_remedy(error)[0]);
    REQUIRE(code(stitch_close_device(device)) == STITCH_ERROR_FAILURE);
    REQUIRE(stitch_error_code(old) == STITCH_ERROR_FAILURE && stitch_error_message(old)[0]);
    stitch_error_destroy(old);
    _exit(0);
  }
  int status;
  REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  ok(twice(2));
  REQUIRE(code(old) == STITCH_ERROR_INVALID_HANDLE);
}

static void fork_before_calls(const char *path) {
  pid_t child = fork();
  int status;
  open_all(path);
  ok(twice(2));
  if (child == 0) _exit(0);
  REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Signal handlers, the locale and the mask of signals are the program's. */
static void process(const char *path) {
  struct sigaction before[32], after;
  sigset_t masked, masked_after;
  memset(&before, 0, sizeof before);
  memset(&after, 0, sizeof after);
  for (int i = 1; i < 32; i++) sigaction(i, NULL, &before[i]);
  pthread_sigmask(SIG_SETMASK, NULL, &masked);
  open_all(path);
  ok(twice(2));
  create_and_destroy(1);
  for (int i = 1; i < 32; i++) {
    sigaction(i, NULL, &after);
    REQUIRE(before[i].sa_handler == after.sa_handler);
  }
  pthread_sigmask(SIG_SETMASK, NULL, &masked_after);
  for (int i = 1; i < 32; i++) REQUIRE(sigismember(&masked, i) == sigismember(&masked_after, i));
  REQUIRE(strcmp(setlocale(LC_ALL, NULL), "C") == 0);
}

/* Python does not start, or has no Stitch: an error, and again an error. */
static void no_python(void) {
  stitch_error_t error = stitch_open_device("host", NULL, &device);
  REQUIRE(error && stitch_error_code(error) == STITCH_ERROR_FAILURE);
  printf("%s | %s\n", stitch_error_message(error), stitch_error_remedy(error));
  stitch_error_destroy(error);
  REQUIRE(code(stitch_open_device("host", NULL, &device)) == STITCH_ERROR_FAILURE);
}

int main(int argc, char **argv) {
  REQUIRE(argc == 3);
  const char *way = argv[1], *path = argv[2];
  if (!strcmp(way, "flat_memory")) flat_memory(atoi(path));
  else if (!strcmp(way, "threads")) threads(path);
  else if (!strcmp(way, "callback")) callback(path);
  else if (!strcmp(way, "fork_after_calls")) fork_after_calls(path);
  else if (!strcmp(way, "fork_before_calls")) fork_before_calls(path);
  else if (!strcmp(way, "process")) process(path);
  else if (!strcmp(way, "no_python")) no_python();
  else return 2;
  puts("ok");
  return 0;
}
