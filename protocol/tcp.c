/* tcp: see tcp.h. */
#include "protocol/tcp.h"
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>

#define NAME_SIZE 16 /* TCP_CA_NAME_MAX */

bool tcp_renew(int fd)
{
    static const char ours[] = "bbr", other[] = "reno"; /* which every kernel has */
    char name[NAME_SIZE + 1] = "";
    socklen_t size = NAME_SIZE;
    if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size) < 0 || strcmp(name, ours) != 0)
        return false;
    return setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, other, sizeof other - 1) == 0 &&
           setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, ours, sizeof ours - 1) == 0;
}
