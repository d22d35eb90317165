# Run by pier.trial.check in a sandbox of a task, in its working directory: a line for each finding, with its kind, its
# path and words about it, goes to /logs/agent/history.tsv.
export GIT_OPTIONAL_LOCKS=0 GIT_NO_LAZY_FETCH=1 GIT_TERMINAL_PROMPT=0 LC_ALL=C
scratch=$(mktemp -d) || exit 0
say() { printf '%s\t%s\t%s\n' "$1" "$2" "$3" >> /logs/agent/history.tsv; }
git_in() { dir=$1; shift; git -c safe.directory='*' -c core.fsmonitor=false --git-dir="$dir" "$@" 2>/dev/null; }
find_in() {
    find "$@" \
        \( -path /proc -o -path /sys -o -path /dev -o -path /logs -o -path /opt/pier -o -path "$scratch" \) -prune -o \
        -type f \( -name HEAD -o -name '*.bundle' -o -name '*.pack' \) -print 2>/dev/null
}
repositories() {
    while IFS= read -r file; do
        dir=${file%/HEAD}
        [ "$dir" != "$file" ] && [ -d "$dir/objects" ] && [ -d "$dir/refs" ] && printf '%s\n' "$dir"
    done
}
others() {
    while IFS= read -r file; do
        case $file in
            *.bundle) head -n 1 "$file" 2>/dev/null | grep -aq '^# v[23] git bundle' && say bundle "$file" '' ;;
            */objects/pack/*) ;;
            *.pack) [ "$(head -c 4 "$file" 2>/dev/null)" = PACK ] && say pack "$file" '' ;;
        esac
    done
}
objects() { git_in "$1" cat-file --batch-all-objects --unordered --batch-check='%(objecttype) %(objectname)'; }
ancestors() { git_in "$1" rev-list HEAD | sort -u; }
look() {
    objects "$1" > "$scratch/objects"
    sed -n 's/^commit //p' "$scratch/objects" | sort -u | comm -23 - "$2" > "$scratch/beyond"
    count=$(wc -l < "$scratch/beyond" | tr -d ' ')
    if [ "$count" -gt 0 ]; then
        git_in "$1" rev-list --exclude=refs/stash --all | sort -u | comm -12 - "$scratch/beyond" > "$scratch/named"
        git_in "$1" rev-list --reflog | sort -u | comm -12 - "$scratch/beyond" |
            comm -23 - "$scratch/named" > "$scratch/logged"
        named=$(wc -l < "$scratch/named" | tr -d ' ') logged=$(wc -l < "$scratch/logged" | tr -d ' ')
        example=$(git_in "$1" log -1 --format='%h %s' "$(head -n 1 "$scratch/beyond")" | cut -c 1-60 | tr '\t' ' ')
        borrowed=; [ -s "$1/objects/info/alternates" ] && borrowed=', some borrowed from another repository'
        loose=$((count - named - logged))
        words="$named in branches and tags, $logged in stashes and reflogs, $loose loose"
        say commits "$1" "$words$borrowed, e.g. $example"
    else
        git_in "$1" rev-list --objects --indexed-objects HEAD | cut -d ' ' -f 1 | sort -u > "$scratch/reached"
        left=$(sed -n 's/^blob //p' "$scratch/objects" | sort -u | comm -23 - "$scratch/reached" | wc -l | tr -d ' ')
        [ "$left" -gt 0 ] && say files "$1" "$left"
    fi
}
find_in "$PWD" > "$scratch/here"
repositories < "$scratch/here" > "$scratch/below"
main=$(git -c safe.directory='*' rev-parse --absolute-git-dir 2>/dev/null) || main=$(head -n 1 "$scratch/below")
[ -n "$main" ] || exit 0
if ! command -v git > /dev/null 2>&1; then
    while IFS= read -r dir; do say unseen "$dir" ''; done < "$scratch/below"
    exit 0
fi
ancestors "$main" > "$scratch/past"
root=$(git_in "$main" rev-list --max-parents=0 HEAD | head -n 1)
look "$main" "$scratch/past"
places=; for place in /root /home /opt /srv /mnt /tmp /var/tmp; do [ -d "$place" ] && places="$places $place"; done
{ cat "$scratch/here"; find_in $places; } | sort -u > "$scratch/all"
others < "$scratch/all"
repositories < "$scratch/all" > "$scratch/every"
while IFS= read -r dir; do
    [ "$dir" = "$main" ] && continue
    if [ -n "$root" ] && git_in "$dir" cat-file -e "$root"; then
        look "$dir" "$scratch/past"
    elif grep -Fqx "$dir" "$scratch/below"; then
        ancestors "$dir" > "$scratch/own"
        look "$dir" "$scratch/own"
    fi
done < "$scratch/every"
rm -rf "$scratch"
