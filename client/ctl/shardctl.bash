# Completion of shardctl in bash: commands and options as its help lists them, jobs as the daemon does.
_shardctl() {
  local word='' command='' commands help lines=()
  commands=$(shardctl help 2>/dev/null | sed -nE '/^commands:/,/^$/s/^  ([a-z]+) .*/\1/p')
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    grep -qxF -- "$word" <<<"$commands" && command=$word && break
  done
  help=$(shardctl help ${command:+"$command"} 2>/dev/null)
  case $3:$2 in
    --address:* | --job_secret_file:* | --output:* | -o:*) mapfile -t lines < <(compgen -f -- "$2") ;;
    *:-*) mapfile -t lines < <(sed -nE 's/^  (-.,)?(--[a-z_]+).*/\2/p' <<<"$help") ;;
    *) if [[ -z $command || $command == help ]]; then
      mapfile -t lines <<<"$commands"
    elif [[ $command == plan ]]; then
      mapfile -t lines < <(compgen -f -- "$2")
    elif [[ $help == *'JOB]'* || $help == *' JOB'* ]]; then
      mapfile -t lines < <(shardctl jobs --json --timeout 1 2>/dev/null | sed -nE 's/^   "name": "(.*)",?$/\1/p')
    fi ;;
  esac
  COMPREPLY=()
  for word in "${lines[@]}"; do
    if [[ $word == "$2"* ]]; then COMPREPLY+=("$word"); fi
  done
}
complete -F _shardctl shardctl
