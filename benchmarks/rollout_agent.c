/* The agent of benchmarks/rollouts.py: calls its model until it says "done", then leaves the answer. Each message says
   how many microseconds the turn before took. It starts in under a millisecond, so that what is measured is not an interpreter. */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static char request[65536], messages[32768], reply[65536];

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static long now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000L + at.tv_nsec / 1000;
}

static int dial(const char *host, int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    int link = socket(AF_INET, SOCK_STREAM, 0);
    if (!inet_aton(host, &address.sin_addr)) fail(host);
    if (connect(link, (void *)&address, sizeof address)) fail("connect");
    return link;
}

/* One exchange; the body of the answer. */
static char *ask(int link, const char *host, int port, const char *path, const char *key) {
    char *end = NULL, *length;
    size_t got = 0;
    int size = snprintf(request, sizeof request,
                        "POST %s/chat/completions HTTP/1.1\r\nHost: %s:%d\r\nAuthorization: Bearer %s\r\n"
                        "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n"
                        "{\"model\":\"m\",\"messages\":[%s]}",
                        path, host, port, key, strlen(messages) + 27, messages);
    if (write(link, request, size) != size) fail("write");
    do {
        ssize_t more = read(link, reply + got, sizeof reply - 1 - got);
        if (more <= 0) fail("read");
        reply[got += more] = 0;
        end = strstr(reply, "\r\n\r\n");
        length = strcasestr(reply, "content-length:");
    } while (!end || !length || got < (size_t)(end + 4 - reply) + strtoul(length + 15, NULL, 10));
    if (strncmp(reply + 9, "200", 3)) fail(reply);
    return end + 4;
}

int main(int count, char **words) {
    const char *url = getenv("OPENAI_BASE_URL"), *key = getenv("OPENAI_API_KEY");
    char host[64], path[256] = "";
    int port = 80, done = 0;
    if (!url || !key || sscanf(url, "http://%63[^:/]:%d%255s", host, &port, path) < 2) fail("OPENAI_BASE_URL");
    int link = dial(host, port);
    strcpy(messages, "{\"role\":\"user\",\"content\":\"go\"}");
    while (!done) {
        long began = now();
        done = strstr(ask(link, host, port, path, key), "done") != NULL;
        if (strcasestr(reply, "connection: close")) {
            close(link);
            link = dial(host, port);
        }
        sprintf(messages + strlen(messages),
                ",{\"role\":\"assistant\",\"content\":\"on\"},{\"role\":\"user\",\"content\":\"%ld\"}", now() - began);
    }
    FILE *answer = fopen(count > 1 ? words[1] : "/tmp/answer", "w");
    if (!answer || fputs("hi\n", answer) < 0 || fclose(answer)) fail("answer");
    return 0;
}
