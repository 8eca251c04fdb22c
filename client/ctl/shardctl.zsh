#compdef shardctl
# Completion of shardctl in zsh, from the same sources as bash's: commands and options as its help lists them, jobs as the
# daemon does.
_shardctl() {
  local word command help
  local -a commands options jobs
  commands=(${(f)"$(shardctl help 2>/dev/null | sed -nE '/^commands:/,/^$/s/^  ([a-z]+) +(.*)/\1:\2/p')"})
  for word in ${words[2,CURRENT-1]}; do
    (( ${commands[(I)$word:*]} )) && command=$word && break
  done
  help=$(shardctl help $command 2>/dev/null)
  case $words[CURRENT-1] in
    --address | --job_secret_file | --output | -o) _files && return ;;
  esac
  if [[ $PREFIX == -* ]]; then
    options=(${(f)"$(sed -nE 's/^  (-.,)?(--[a-z_]+)( [A-Z]+)? +(.*)/\2:\4/p' <<<$help)"})
    _describe option options
  elif [[ -z $command || $command == help ]]; then
    _describe command commands
  elif [[ $command == plan ]]; then
    _files
  elif [[ $help == *(' JOB'|'JOB]')* ]]; then
    jobs=(${(f)"$(shardctl jobs --json --timeout 1 2>/dev/null | sed -nE 's/^   "name": "(.*)",?$/\1/p')"})
    compadd -a jobs
  fi
}
_shardctl "$@"
