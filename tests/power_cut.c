/* Preloaded into a process: keeps what it has synced, which is what a power cut leaves.

   $POWER_CUT_ROOT   the folder that is looked at
   $POWER_CUT_DISK   where the content of its files, and the names in its folders, are kept by
                     inode number as they were when fsync(2) or fdatasync(2) returned; see
                     tests/power_cut.py. "syncs" there has a byte for each such call. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void copy_content(int source, FILE *target) {
    char block[1 << 16];
    off_t offset = 0;
    ssize_t size;
    while ((size = pread(source, block, sizeof block, offset)) > 0) {
        fwrite(block, 1, size, target);
        offset += size;
    }
}

static void list_names(const char *path, FILE *target) {
    struct dirent *entry;
    struct stat status;
    DIR *folder = opendir(path);
    fprintf(target, "%s\n", path);
    while (folder && (entry = readdir(folder)))
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..") &&
            !fstatat(dirfd(folder), entry->d_name, &status, AT_SYMLINK_NOFOLLOW))
            fprintf(target, "%lu %s\n", (unsigned long)status.st_ino, entry->d_name);
    if (folder) closedir(folder);
}

static void keep(int fd) {
    const char *root = getenv("POWER_CUT_ROOT"), *disk = getenv("POWER_CUT_DISK");
    char link[64], path[PATH_MAX], draft[PATH_MAX], kept[PATH_MAX];
    struct stat status;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (!root || !disk || size < 0 || fstat(fd, &status)) return;
    path[size] = 0;
    if (strncmp(path, root, strlen(root))) return;
    pthread_mutex_lock(&lock);
    snprintf(draft, sizeof draft, "%s/draft", disk);
    snprintf(kept, sizeof kept, "%s/%s-%lu", disk, S_ISDIR(status.st_mode) ? "folder" : "file",
             (unsigned long)status.st_ino);
    FILE *target = fopen(draft, "w");
    if (S_ISDIR(status.st_mode)) {
        list_names(path, target);
    } else {
        int source = open(link, O_RDONLY | O_CLOEXEC);
        copy_content(source, target);
        close(source);
    }
    fclose(target);
    rename(draft, kept);
    snprintf(kept, sizeof kept, "%s/syncs", disk);
    target = fopen(kept, "a");
    fputc('.', target);
    fclose(target);
    pthread_mutex_unlock(&lock);
}

static int synced(const char *name, int fd) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    int status = real(fd);
    if (!status) keep(fd);
    return status;
}

int fsync(int fd) { return synced("fsync", fd); }
int fdatasync(int fd) { return synced("fdatasync", fd); }
