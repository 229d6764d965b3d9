/* tcp: see tcp.h. */
#include "protocol/tcp.h"
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

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

static bool choose(int fd, const char *name)
{
    return setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, (socklen_t)strlen(name)) == 0;
}

/* Where a route has chosen BBR this process need not be allowed to, and the connection would be left with the other. */
static bool may_choose(const char *other, const char *ours)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); /* -1 can choose nothing */
    bool may = choose(fd, other) && choose(fd, ours);
    close(fd);
    return may;
}

bool tcp_renew(int fd)
{
    static const char ours[] = "bbr", other[] = "reno"; /* which every kernel has */
    char name[NAME_SIZE + 1] = "";
    socklen_t size = NAME_SIZE;
    if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size) < 0 || strcmp(name, ours) != 0 ||
        !may_renew(fd))
        return false;
    return may_choose(other, ours) && choose(fd, other) && choose(fd, ours);
}
