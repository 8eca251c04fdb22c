# What zsh offers for a line: types it, with a tab behind it, into a zsh with the completion system, and prints what lists.
# Usage: zsh -f zsh_completion.zsh FOLDER_OF_PROGRAMS FOLDER_OF_FUNCTIONS LINE
zmodload zsh/zpty
zpty completes zsh -f -i
# Words in two pieces are not met where the line that has them is echoed. The prompt is there when zle reads.
zpty -w completes "PATH=$1:\$PATH; fpath=($2 \$fpath); stty rows 100 columns 200; autoload -U compinit; compinit -D -u; \
  unsetopt zle_bracketed_paste beep; zstyle ':completion:*' verbose no; LISTMAX=0; setopt auto_list no_auto_menu no_list_beep; \
  PS1='REA''DY>'"
zpty -r -m completes line '*READY>*'
zpty -w -n completes "$3"$'\t\t\C-e\C-u'"print DO''NE"$'\n'
zpty -r -m completes line '*DONE*'
print -r -- "$line" | sed 's/\x1b\[[0-9;?]*[A-Za-z]//g' | tr -d '\r\a'
zpty -d completes
