/* log: one line an event to stderr: `2026-01-31T12:00:00.123Z INFO  cloud: text`. Colours only on a terminal.
 * No line may hold prompt text, token ids, block ids or credentials. Thread-safe; a line is one write(2). */
#ifndef TANDEM_SHARED_LOG_H
#define TANDEM_SHARED_LOG_H

enum log_level { LOG_INFO, LOG_WARN, LOG_ERROR };

void log_set_level(enum log_level level);
int log_level_parse(const char *text, enum log_level *out); /* "info" | "warn" | "error" */
void log_write(enum log_level level, const char *module, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#define log_info(module, ...)  log_write(LOG_INFO, module, __VA_ARGS__)
#define log_warn(module, ...)  log_write(LOG_WARN, module, __VA_ARGS__)
#define log_error(module, ...) log_write(LOG_ERROR, module, __VA_ARGS__)

#endif
