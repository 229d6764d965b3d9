/* uring: one large read as several small ones that the kernel has in flight at once. A plain read() of a file walks through it with a short look-ahead,
 * so a fast disk waits for the reader; the same bytes asked for in pieces keep its queue filled. Through io_uring by its system calls alone
 * (three of them, and two shared rings): a library would be a dependency of every program for one function. */
#ifndef TANDEM_STORE_URING_H
#define TANDEM_STORE_URING_H
#include "shared/base.h"

#define URING_PIECE_SIZE (256u << 10)
#define URING_DEPTH      8u

/* Read [offset, offset + size) of fd. Returns how many of the first bytes have come (less than size only at the end of the file), or -errno; -ENOSYS:
 * there is no ring (an old kernel, a container that forbids it, a build without its header), read in another way. Each thread has a ring of its own, which goes
 * with the thread. */
int64_t uring_read(int fd, void *data, size_t size, uint64_t offset);

#endif
