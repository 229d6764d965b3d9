/* tcp: see tcp.h. */
#include "protocol/tcp.h"
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>

#define NAME_SIZE 16 /* TCP_CA_NAME_MAX */

bool tcp_may_renew(uint32_t rtt_us, uint32_t min_rtt_us)
{
    return rtt_us < 2 * (uint64_t)min_rtt_us + TCP_RENEW_SLACK_US;
}

static bool may_renew(int fd)
{
    struct tcp_info info = {0};
    socklen_t size = sizeof info;
    return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 &&
           size >= offsetof(struct tcp_info, tcpi_min_rtt) + sizeof info.tcpi_min_rtt &&
           tcp_may_renew(info.tcpi_rtt, info.tcpi_min_rtt);
}

bool tcp_renew(int fd)
{
    static const char ours[] = "bbr", other[] = "reno"; /* which every kernel has */
    char name[NAME_SIZE + 1] = "";
    socklen_t size = NAME_SIZE;
    if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size) < 0 || strcmp(name, ours) != 0 ||
        !may_renew(fd))
        return false;
    return setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, other, sizeof other - 1) == 0 &&
           setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, ours, sizeof ours - 1) == 0;
}
