/* stop: a stop that ends. In good order a program waits for its threads, and a thread that waits for a disk which does not answer can neither be
 * ended nor left behind. Both programs may be killed at any moment, so one that has not stopped in STOP_MAX_S ends as if it had been. */
#ifndef TANDEM_SHARED_STOP_H
#define TANDEM_SHARED_STOP_H

#include <stdbool.h>
#include <stdint.h>

#define STOP_MAX_S    80u /* replies have 10 of them, the disk the others; systemd waits for 90 */
#define STOP_SILENT_S 15u /* of them where the disk does not answer at all; the replies' 10 are among them */

/* The stop has begun: unless stop_done comes within the time, the program ends with code 1 and one line; at once with a second SIGTERM or SIGINT,
 * which must be blocked in all threads. silent_seconds: the time while a disk does not answer. by_signal: the caller has taken one. Another call without
 * changes nothing. */
void stop_begins(const char *module, unsigned seconds, unsigned silent_seconds, bool by_signal);
/* The thread that writes to the disk is in a call that should end by then, by the monotonic clock; 0: in none. */
void stop_note_call(uint64_t due_us);
/* So many more threads, or fewer, are waited for that are late with a read. It counts while the one that writes is in no call. */
void stop_note_late(int change);
void stop_done(void); /* also where none has begun */

#endif
